"""Heal a sketched model: match it to the dense one on data without labels.

pair        whether both models go together
landmarks   places in both models where hidden states are compared
match       the loss: how far the small model is from its teacher on a call
descent     how the factors are changed
rates       the rate of each step
best_state  the best state of a model that learns, by batches that it never learns from
options     what it may be told
report      what came of it
healer      all of it: `heal`
refine      the same, as the options of `sketchify` and `sketch_onnx` say
"""
