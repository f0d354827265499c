"""Rounds across machines, for any transport: protocol, handshake, the server's and the client's end."""
