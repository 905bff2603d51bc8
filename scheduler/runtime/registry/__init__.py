"""What must survive a restart: models, leases, replicas, keys, the lead and the broker's journal."""
