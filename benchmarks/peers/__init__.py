"""Other engines, built and driven so that they show their best."""
