"""A user's model: copied, run and watched, and left as it was.

substitute       new modules in the place of old ones, in a copy or in the model itself
wrapped          the user's model within what torch has wrapped around it
surroundings     work the same wherever the caller stands, and leave everything there as it was
source           the text of a class's own methods, read and not run
written_weights  layers whose weight a forward writes to
derivatives      models that differentiate in their forward
batches          data, however it is given ──► recorded calls of the model
divided          batches divided into smaller ones, where samples are taken one by one
half_products    products of half types in float32, on a processor that has none of its own
reentrant        parts that are computed again, in a way that gradients can be asked through
in_range         lookups checked before a kernel makes them
outputs          the tensors of a model's result, and how far two results are apart
output_kind      what a model's result is
rows             tensors as rows: padded positions left out
watched          layers that see what reaches them; copies of a model that hold them
cached           which layers write the keys and values that a decoder keeps
batch_norms      what batch norms know of inputs in training, and how far others are from it
stopwatch        seconds that calls take
synthetic        inputs made up for a model without data, by what it says of its own inputs
input_forms      what those may look like
natural          images and sounds with the spectra of natural ones
sounds           sounds of harmonics, and noise
matched_images   images that give a model the statistics that its batch norms keep
own_text         texts that a causal language model samples itself
spliced          texts of parts of several
word_texts       texts of words at random, each about a topic
"""
