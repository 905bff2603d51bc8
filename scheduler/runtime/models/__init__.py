"""What is served, as people declare it: documents, their checks, changes, and what is run of them."""
