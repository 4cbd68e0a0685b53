"""The common gRPC code of all services: errors, server, channels, sessions, entry points. Imports `protos` only."""
