"""What every service needs from gRPC: errors, server, channels, sessions, entry points. Imports `protos` only."""
