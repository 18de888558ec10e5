"""The study's English. Keys are the same in every language (a test compares them); braces are filled in by the report."""

WORDS = {
    # what the study is
    "title": "Half precision, measured",
    "intro": "{runs} training runs on this machine: what half precision costs, and how scaling the loss saves it.",
    "intro_quick": "A short form for a lecture ({runs} runs): fewer tasks, regimes and epochs than the full study.",
    "machine": "{name}, {cores} cores, {system}, Python {python}, PyTorch {torch}, halfstep {halfstep}",
    "emulated_note": "This processor has no native arithmetic for {formats}. Matrix products and convolutions ran as"
    " fp32 products of 16-bit values, rounded once to 16 bits, as a Tensor Core does it. Losses and gradients are those of"
    " the format; a time would be that of the emulation, so none is shown.",
    "native_note": "All regimes ran in native arithmetic.",
    "outcome": "What it learned",
    "inside": "What happened inside",
    # verdicts
    "matches fp32": "matches fp32",
    "worse": "worse",
    "stalls": "stalls",
    "reference": "reference",
    "diverges": "diverges",
    # columns
    "regime": "regime",
    "task": "task",
    "error": "error",
    "final_loss": "test loss",
    "difference": "minus fp32",
    "verdict": "verdict",
    "skipped": "skipped steps",
    "zeros": "zero gradients, start → end",
    "extra_zeros": "more than fp32",
    "first_layer_zeros": "first layer, start",
    "moved": "weights that moved",
    "bytes": "bytes per parameter",
    "activations": "activations",
    "copies": "16-bit weight copies",
    "time": "time per step",
    "scale": "final scale",
    "emulated": "emulated",
    "not_measured": "not measured",
    # metrics
    "weight_error": "weight error",
    "weight_error_long": "distance from the true weights, relative to their length",
    "test_mse": "test MSE",
    "test_mse_long": "mean squared error on 360 unseen images",
    "test_error": "test error",
    "test_error_long": "share of 360 unseen images that are misread",
    # tasks
    "task.linear": "Linear regression, ordinary inputs",
    "task.linear.text": "The lecture's example: Linear(10, 1), SGD, mean squared error, inputs from a standard normal"
    " distribution. The control: with gradients of ordinary size fp16 needs no scaling.",
    "task.linear-small-units": "The same regression in small physical units",
    "task.linear-small-units.text": "The same numbers with inputs and targets 2⁻¹⁴ times as large (metres instead of tenths"
    " of a millimetre, say) and the learning rate adapted, so in exact arithmetic it is the same run. The gradients are now"
    " near 2⁻²⁸, below 2⁻²⁵, where fp16 rounds to zero. Without scaling the weights do not move at all: a flat line, not an"
    " oscillation.",
    "task.autoencoder": "Deep sigmoid autoencoder on handwritten digits",
    "task.autoencoder.text": "64-256-128-64-32-8 and back, Adam. A sigmoid's slope is at most 1/4, so each layer shrinks the"
    " gradient on its way back; it reaches the first layers too small for fp16. The run looks healthy, no NaN anywhere, and"
    " ends with the error of predicting the mean image.",
    "task.autoencoder-tanh": "The same autoencoder with tanh",
    "task.autoencoder-tanh.text": "A tanh has slope 1 at zero: gradients stay in fp16's range, and scaling is not needed.",
    "task.autoencoder-relu": "The same autoencoder with ReLU",
    "task.autoencoder-relu.text": "A ReLU has slope 1 or 0: gradients stay in fp16's range, and scaling is not needed.",
    "task.digits": "Small convolutional network with batch normalisation",
    "task.digits.text": "Classifying the same digits. Normalised layers keep gradients at ordinary size; every regime is fine."
    " Half precision is often free, and this is the usual case.",
    # regimes
    "regime.fp32": "full precision, the reference",
    "regime.fp16-unscaled": "fp16 autocast, loss as it is",
    "regime.fp16-static-8": "fp16, loss times 8",
    "regime.fp16-static-1024": "fp16, loss times 1024",
    "regime.fp16-dynamic": "fp16, starts at 2¹⁴, doubles after 200 clean steps, halves on overflow",
    "regime.fp16-dynamic-from-8": "fp16, starts at 8, doubles after 2000 clean steps (every library's default)",
    "regime.fp16-dynamic-from-8-fast": "fp16, starts at 8, doubles after 200 clean steps",
    "regime.fp16-adaptive": "fp16, scale from the size of the largest gradients seen (experimental)",
    "regime.bf16": "bf16 autocast, loss as it is: fp32's range, fewer digits",
    # sections and captions of the report
    "at_a_glance": "At a glance",
    "at_a_glance_text": "One verdict per task and regime, computed from the thresholds below.",
    "why": "Why fp16 needs a scale",
    "gradients_caption": "Gradients of the first training step of “{task}”: grey, as fp32 computes them; coloured, what"
    " arrived in fp16. fp16 rounds anything up to 2⁻²⁵ to zero and loses digits below 2⁻¹⁴. {fact}",
    "gradients_fact": "Of the first layer's gradient elements {unscaled} are exactly zero without scaling, {scaled} with scale"
    " {scale}, {fp32} in fp32.",
    "scale_title": "The scale over time",
    "scale_caption": "How each regime's scale moved on “{task}”. A cross marks a step that overflowed and was skipped; the"
    " dashed line is the scale that lifts half of the first layer's first gradients above fp16's smallest number.",
    "bytes_title": "Where the bytes are",
    "bytes_caption": "Measured from live tensors. With autocast, weights, gradients and optimizer state stay in fp32; what"
    " halves is what the forward pass keeps for the backward pass. The 16-bit copies of the weights, kept beside it, eat part"
    " of that where the batch is small.",
    "curves_caption": "Error on unseen data during training (seed 0). {metric}.",
    "how": "How it was judged",
    "how_pairs": "Every run is compared with the fp32 run of the same seed: same first weights, same order of batches.",
    "how_diverges": "diverges: loss or a weight is inf or NaN, or the error is more than {factor} times that of the best"
    " predictor that ignores its input.",
    "how_stalls": "stalls: not one weight moved, or the error is at least {share} of that predictor's.",
    "how_matches": "matches fp32: the error is at most fp32's plus the tolerance of the task, in the table below.",
    "how_worse": "worse: anything else. With several seeds, the worst of their verdicts counts.",
    "how_zeros": "Zero gradients: share of all gradient elements that are exactly zero at the first and the last step, before"
    " unscaling. Some are zero in fp32 too (pixels that are always black).",
    "how_activations": "Activations: every storage that autograd keeps between forward and backward of one step, each counted"
    " once; parameters, buffers and the 16-bit copies of weights are apart.",
    "how_time": "Time per step: median of turns that the native regimes took in one process, relative to fp32.",
    "tolerance": "tolerance",
    "constant": "predictor that ignores its input",
    "relative_and_absolute": "{relative} of fp32's error + {absolute}",
    "again": "To run this again",
    "english_plots": "No font with Chinese characters was found, so the plots are labelled in English.",
    # plots
    "plot.step": "training step",
    "plot.first_layer": "first layer",
    "plot.all_layers": "all layers",
    "plot.unscaled": "without scaling",
    "plot.scaled": "loss × {scale}",
    "plot.zeros": "zero: {fp16}  (fp32: {fp32})",
    "plot.arrived_unscaled": "kept by fp16, unscaled",
    "plot.arrived_scaled": "kept by fp16, scaled",
    "plot.scale_title": "The scale over time",
    "plot.batch": "{task}, batch of {size}",
    "plot.true_gradient": "true gradient (fp32)",
    "plot.rounds_to_zero": "rounds to 0",
    "plot.subnormal": "loses\ndigits",
    "plot.normal": "exact to 11 bits",
    "plot.too_large": "inf",
    "plot.magnitude": "size of a gradient element, as fp16 sees it",
    "plot.gradients_title": "What fp16 does to the gradients of the first step",
    "plot.scale": "loss scale",
    "plot.needed": "scale that half of the first layer's gradients need",
    "plot.skip": "skipped step",
    "plot.constant": "predictor that ignores its input",
    "plot.weights": "weights",
    "plot.gradients": "gradients",
    "plot.state": "optimizer state",
    "plot.copies": "16-bit weight copies",
    "plot.activations": "activations",
    "plot.fp16_any": "fp16, any scale",
    "plot.bytes_title": "What one training step holds in memory",
}
