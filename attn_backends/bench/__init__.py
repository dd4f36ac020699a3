"""Measuring: cases, timers, peers, and the account of memory and traffic."""
