"""Who is alive and which prefix blocks are cached where, in Redis. Imports `protos` only. Never on the data path."""
