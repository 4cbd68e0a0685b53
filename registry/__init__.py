"""In Redis: which workers live, and which prefix blocks they have cached. Imports `protos` only. Never on the data
path.
"""
