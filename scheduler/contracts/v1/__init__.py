"""Protocol buffers and the code generated from them (`make proto`)."""
