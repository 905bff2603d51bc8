"""`make demo`: the whole loop on one machine, with the figures that it produced."""
