"""Simulates a fleet of replicas: thousands of engines and a router, on one processor. Follows phase 11.

It uses discrete events: the clock jumps from one event to the next. A request arrives, a router chooses its replica,
and the replica's steps take as long as measured steps of the engine.
"""
