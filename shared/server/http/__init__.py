"""HTTP around the routes: connections, middleware, streams of events, and the log."""
