"""How the last program of several takes on what must wait for all of them. Introduced in phase 3.1.

Programs of one launch cannot wait for each other, but they can count: whoever finds that all others have been there
does the rest. It saves the second launch that a reduction over several programs would need. The pattern is that of
CUDA's ``threadFenceReduction`` sample. Invariant: a counter is zero between launches.
"""

from shared.kernels.launch import tl, triton


@triton.jit
def is_last_arrival(counter, num_arrivals):
    """Count this program in, and say whether it is the last of ``num_arrivals``.

    What the others stored before they arrived is then visible to loads that pass by the first-level cache (``.cg``).
    The barrier puts the stores of all threads before the one thread's atomic, which releases them and acquires those
    of the others. The last arrival sets the counter back.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_arrivals - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
