"""Benchmarks: prompt sets, arms measured in turns, reports that other tools can read."""
