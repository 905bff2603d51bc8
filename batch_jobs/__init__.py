"""Batch jobs: files of requests that run in the gaps and lose nothing."""
