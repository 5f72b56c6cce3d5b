"""HTTP around the routes: connections, middleware, streams of events, the log and the metrics."""
