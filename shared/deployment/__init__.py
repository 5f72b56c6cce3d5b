"""The server on many machines, as an application of Ray Serve. Follows phase 11.

Ray Serve places, scales, restarts and drains replicas. A request passes through two processes: Ray Serve's HTTP proxy,
in which the gateway reads the body and chooses a replica, and the replica, which runs the application of
:mod:`shared.server.app`.
"""
