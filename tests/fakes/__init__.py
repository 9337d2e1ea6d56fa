"""Stand-ins for parts that a test does not want to run for real."""
