"""Bounds of rounding, where two computations add up the same numbers in another order.

Runs of one machine with equal threads are compared without tolerance: real, simulated, replayed and resumed. A
tolerance remains where plain torch, another collective, other workers or servers add up in another order:

    a sum of n numbers, |x| <= m        differs by at most 2 n u m            u = 2**-53 (float64), 2**-24 (float32)
    T steps of a contracting optimizer  add up T such differences             n <= 64 images or inputs, T <= 60 steps

In float64 that is 2 * 64 * 60 * 2**-53 = 9e-13. In float32 the same worst case is 5e-4; signs of rounding errors are
mixed, so tests allow 1e-5 at most, about twice sqrt(n T) u. Other comparisons state their reason:

    losses of `evaluate` with another number of threads   1e-6       a mean of 359 losses in float32: sqrt(359) u
    checkpoints of another processor                      1e-3       compressors choose other entries after rounding
    Hessian-free, K-FAC: another number of workers        1e-9       solved systems multiply rounding by their condition
    models of NumPy, Pillow, scikit-learn                 each test  another formula, stop rule or pixel grid
"""

REORDERED = {"rtol": 1e-12, "atol": 1e-12}
"""Bound for float64."""
