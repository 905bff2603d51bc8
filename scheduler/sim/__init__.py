"""Virtual time: the same core, driven by traces."""
