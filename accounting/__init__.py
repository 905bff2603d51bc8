"""Accounting: every attempt once, every GPU-second somewhere."""
