"""Fit sketched layers to what a model computes on data: no labels, no training.

first_look    one run of the dense model over all batches, before any is learnt from
sensitivity   what an error at a layer's output does to the model's
data_pass     what reaches layers of the dense model, added up over the data
study         what the dense model shows of its layers on the data
residuals         where the output of a layer is added to what went around it
couplings         layers that hand their features to one other layer only
paths         whether the model's code may lead elsewhere than data showed
ties          what layers that have a table in common want of it
narrow        what two such layers keep of the features between them
shared_input  layers that are given one tensor, and one input factor for all of them
shared_parts  parts of one module, as the experts of a mixture, and one factor for all of them
lockstep      dense and sketched model side by side, layer by layer
repeated      what reaches layers that one forward calls several times
branch_fit    low-rank branches fitted to what layers lack, layer by layer
branch_sums   one branch from sums over rows
layer_fit     one layer from what reached it: the callback of the lockstep
norms         batch norms behind fitted layers, with statistics of what reaches them now
work_folder   a folder that keeps what was done
resume        what is kept of calibration: the study, trials, fitted layers
calibrate     all of it, for the sites of a plan
choose        the plan: by cuts, and where they cannot tell by fits
held_out      plans compared by the results on batches that nothing was learnt from
few_data      how far few data are believed, and whether more than none
unlike        whether data is like what a model was trained on, as far as its batch norms know
closeness     how close a sketched model's outputs are to the dense model's on the same inputs
inputs        what layers are fitted to, and what a sketch is compared with its model on
unseen        how close a sketch is on batches that it was not fitted to
trials        which of several is taken, by distances on held-out batches
verdict       the last word on a sketched model
"""
