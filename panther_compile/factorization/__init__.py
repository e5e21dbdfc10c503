"""Matrices and kernels of low rank: how they are found, what a rank stores and costs.

balance     pairs whose latent is even, which int8 costs little
factorize   truncated SVD and randomized range finder
conv2d      low-rank forms of a convolution's weight
pivot       the pivoted form: r (O + I - r) numbers in place of r (O + I)
sketches    random test matrices
candidates  the ways a weight may be stored: what each rank costs and keeps
cost        whether a sketch will be faster: a roofline in plain arithmetic
shared_basis several weights with one factor in common
fit_matrix  A sketched linear layer from second moments
gram        xᵀ x at two thirds of the cost of a product
values      whether weights hold values that can be fitted to
moments     Second moments of what reaches a layer in the dense model (x) and in the sketched one (z)
row_sums    Sums over rows, whole and by halves: what second moments are made of
reliability How much of a change is told by the inputs that it comes with
gain        what restores the deviation of outputs that were fitted
whiten      The best rank-r matrix in the metric of data: closed form, no training
"""
