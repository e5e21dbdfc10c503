"""Fit sketched layers to what a model computes on data: no labels, no training.

batches       data, however it is given ──► recorded calls of the model
outputs       the tensors of a model's result, and how far two results are apart
watched       stand-ins that see what reaches a layer; copies of a model that hold them
moments       second moments of a layer's inputs
sensitivity   what an error at a layer's output does to the model's
whiten        the best rank-r matrix for given moments
lockstep      dense and sketched model side by side, layer by layer
fit_matrix    a linear layer from moments
fit_conv2d    a convolution by least squares
resume        a folder that keeps what was done
calibrate     all of it, for the sites of a plan
"""
