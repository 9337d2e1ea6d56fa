"""Comparison with reference implementations, case by case; see README.md beside this file."""
