"""What clients send: request bodies, read and checked."""
