"""Lets the last program of a group to arrive reduce the results of all. Introduced in phase 3.1.

Programs of one launch cannot wait for each other, but they can increment a counter: the program that arrives last does
the reduction. This saves the second launch that a reduction over several programs would need. The pattern is that of
CUDA's ``threadFenceReduction`` sample. Invariant: counters are zero between launches.
"""

from shared.kernels.launch import tl, triton


@triton.jit
def is_last_arrival(counter, num_arrivals):
    """Count this program and return whether it is the last of ``num_arrivals``.

    The stores that other programs made before they arrived are then visible to loads that bypass the L1 cache
    (``.cg``). The barrier orders the stores of all threads before the one thread's atomic, which releases them and
    acquires those of the other programs. The last arrival resets the counter.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_arrivals - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
