"""A fleet of replicas as a simulation: thousands of engines behind a router, on one processor. Follows phase 11.

Discrete events: the clock jumps from one event to the next. A request arrives, a router chooses its replica, and the
replica's steps take as long as steps of the engine did when they were measured.
"""
