"""What makes decisions happen: registry, snapshot, loop, applier, broker and its clients."""
