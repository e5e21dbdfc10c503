"""The kinds of layers that can be sketched, one file a kind, and what the rest of the library asks of them.

base        the contract: what a kind answers
registry    all kinds, in the order in which they claim modules
match       is a module really the plain layer it looks like?
linear      nn.Linear
conv2d      nn.Conv2d
attention   nn.MultiheadAttention
embedding   nn.Embedding
table       the best table for the tokens of data
targets     the weights that data can fit, and copies of a model in which they are watched
conv1d_hf       Hugging Face's Conv1D (GPT-2), a linear layer whose weight is (I, O), becomes SketchedConv1D
conv_calls      The plain convolution that a functional call or an ONNX node computes
conv_uses       Whether a subclass of a convolution uses its weight in calls of torch's alone
table_uses      Whether a subclass of an embedding looks its weight up as torch's alone does
convolution     What the kinds of convolutions have in common
conv_on_plane   nn.Conv1d and nn.Conv3d become SketchedConv1d and 3d
conv_transpose  nn.ConvTranspose1d, 2d and 3d become SketchedConvTranspose1d, 2d and 3d
windows         What single outputs of a convolution read, and single pixels
saving          What a class that writes its own `state_dict` makes of its parameters
experts         the experts of Hugging Face mixtures become SketchedExperts
fit_conv2d      A sketched convolution from data
kernel_descent  Factors of a kernel brought closer in the metric of whole patches
kernel_metric   How much an error of a k x k kernel shows, by the data
parts           The weights of a site, whatever its kind
plain_form      layers that make their weight in each call, and the plain ones that they stand for
recurrent       nn.LSTM, nn.GRU, nn.LSTMCell and nn.GRUCell become SketchedLSTM, ...
row_space       A layer of very many inputs and fewer outputs, seen in the row space of its weight
stack_uses      How a module's own code uses its 3-D parameters
view            What data sees of a dense layer, whatever its kind
weights         What kinds have in common
"""
