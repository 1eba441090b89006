"""Test support of the dsa library; never installed and never imported by it."""
