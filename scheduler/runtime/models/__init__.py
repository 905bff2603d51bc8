"""What is served, as people declare it: documents, their checks and changes, and what the broker runs of them."""
