"""The scheduler: contracts that every part shares, pure decisions, and the runtime that applies them."""
