"""Sketched models in other libraries: one file a library, imported only where that library is.

accelerated   accelerate's own loop over a parallel model
adapters      LoRA of PEFT on sketched layers, by the names of the dense ones, its start from what is left out
conversions   Weights that transformers merges or splits, left apart in sketched layers
converted_weights  What transformers makes of the tensors of a folder
dense_state   State dicts of a dense model in a sketched one
diffusion     `save_pretrained` and `from_pretrained` of diffusers, for models with sketched layers
diffusion_mixin   Sketches as they are when diffusers saves them, and made of a config
folder_by_weights  A Hugging Face folder sketched weight by weight, for models that are larger than memory
folder_files  What lies beside the weights in a folder: tokenizers, templates, other modules
folder_with_data   A folder sketched with data, its weights mapped
folders       The model of a folder, with its weights or without any
hf_trainer    transformers' Trainer over a parallel model
latent_cache  LatentCache
latent_layer  One layer of a latent cache
latent_spans  Where keys and values lie: the spans of the sketched layers that may write them
lightning_strategy   a strategy of Lightning that trains one module of a LightningModule by a partition
model_card    A model card, README.md, beside what `save_pretrained` of transformers writes
panther       Layers of Panther (pawX) as layers of ours
peft_models   PEFT's models of prompts, and of several kinds of adapters at once, of sketched layers
pretrained    `save_pretrained` and `from_pretrained` of transformers, for models with sketched layers
saved_config  What the configs of transformers and diffusers have in common that tell of a sketch
save_pretrained   What `save_pretrained` of transformers does besides
stored_weights     The tensors of a folder, by their names in its model
"""
