"""Admission for requests of other processes: the owner of the queues, and the way to it."""
