"""A user's model: copied, run and watched, and left as it was.

substitute    new modules in the place of old ones, in a copy or in the model itself
written_weights  layers whose weight a forward writes to
surroundings  work the same wherever the caller stands, and leave everything there as it was
batches       data, however it is given ──► recorded calls of the model
half_products products of half types in float32, on a processor that has none of its own
divided       batches divided into smaller ones, where samples are taken one by one
outputs       the tensors of a model's result, and how far two results are apart
rows          tensors as rows: padded positions left out
cached        which layers write the keys and values that a decoder keeps
watched       layers that see what reaches them; copies of a model that hold them
stopwatch     seconds that calls take
natural       Images and sounds with the spectra of natural ones, and of the colours that a model's batch nor
output_kind   What a model's result is
spliced       Texts of parts of several
own_text      Texts that a causal language model samples itself
synthetic     Inputs made up for a model without data, by what it says of its own inputs
"""
