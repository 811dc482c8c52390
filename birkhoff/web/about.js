// Explanations of the panels, by panel name: what is drawn, how to read it, what to be careful with.

export const ABOUT = {
  chat: [
    "The model's answer, one box per token. A token's colour shows how surprising it was to the model: pale " +
      "tokens were almost certain, dark ones unlikely.",
    "Click a token and every picture on the page shows that token. The pop-up lists what the model could have written " +
      "instead; branch continues from there with the other token.",
    "Probabilities are those before temperature.",
  ],
  heatmap: [
    "One column per token, one row per sublayer, the first at the top. The colour of a cell is one number: choose " +
      "which one under “value”.",
    "DeepSeek-V4 carries four vectors per token (streams) from layer to layer, where other models carry one. The norm " +
      "of a stream says how much it holds; the read and write weights say which streams a sublayer uses.",
    "The first token is far larger than others in most models, so colours leave out the outermost 1 % of values.",
  ],
  film: [
    "How the four streams of the pinned token are mixed around each sublayer. A tile is a 4 × 4 matrix: row = stream " +
      "it comes from, column = stream it goes to, dark = much. A dark diagonal means that the streams stay apart.",
    "Bars at the left show from which streams the sublayer reads its input, bars below to which streams it writes its " +
      "output. They are scaled per sublayer; hover for numbers.",
    "Rows and columns of a tile sum to 1 (the matrix is doubly stochastic), so mixing moves content and amplifies none.",
  ],
  lineage: [
    "The tiles of the film strip between two depths multiplied together: how much of stream 0 at the start is found in " +
      "each stream at the end.",
    "0.25 everywhere means that the streams are fully mixed; 1 on the diagonal that they never met. What sublayers " +
      "write is not part of it.",
  ],
  experts: [
    "Every layer has many small feed-forward networks (experts) and runs only a few of them for a token. Coloured boxes " +
      "with a number are the experts chosen for the pinned token, darker with more weight.",
    "Layers marked # choose by a hash of the token id: a token always gets the same experts there.",
  ],
  lens: [
    "What the model would write next if it stopped at this depth: the final norm and the output matrix applied to each " +
      "stream, to the mean of the streams, and to the mix the head uses.",
    "Read downwards to see the prediction form. Streams were not trained to be read alone: several columns that " +
      "agree mean more than one.",
  ],
  memory: [
    "Where the pinned token looked, one line per layer, averaged over heads; the text runs from left to right.",
    "The lower half of a line is the sliding window, token by token. The upper half are compressed blocks: one box " +
      "stands for as many tokens as it is wide. The sink at the right is attention given to nothing.",
    "The weight of a block does not say which of its tokens mattered.",
  ],
  features: [
    "A sparse autoencoder describes the model's activations by a few active features of a large dictionary. Click a " +
      "token for its features, or search.",
    "Labels were made automatically: each is the simple rule that best predicts where a feature is active. The score " +
      "is the correlation of that rule with the activation on texts it was not chosen on: 1 is a perfect rule, " +
      "below 0.3 it is hardly a hint. Read the contexts.",
    "Features that are active on most tokens are the strongest everywhere and say little, so the order is by how " +
      "specific a feature is to the token.",
  ],
  dashboard: [
    "Texts on which the selected feature is strongest, with the peak marked, and examples of its " +
      "weaker activations. The strongest alone flatter a feature.",
    "“Makes likelier” pushes the feature's direction straight to the output, past the layers in between: an indication " +
      "of what it does. Clamp it to see.",
  ],
  bench: [
    "The same question answered twice with the same random numbers: as the model is, and with a vector added to its " +
      "streams or a feature set to a value. What differs comes from the edit.",
    "Strength 1 is the length the vector was stored with. Too much of it breaks the text: watch the health line.",
    "After the first difference the texts go separate ways, so the chart stops there.",
  ],
  sweep: [
    "One edit at nine strengths: how unlikely the steered text is to the unsteered model, and how repetitive.",
    "A knee marks where the text leaves the range of ordinary answers, for one seed: an indication.",
  ],
  contrast: [
    "Two sets of texts that differ in one thing. At every layer a direction is fitted to half of the texts and tested on " +
      "the rest: 1.00 separates them perfectly, 0.50 is chance.",
    "With four texts a side 1.00 is easily luck: use more.",
  ],
  requests: ["What the server is computing right now, from every client."],
  captures: [
    "Activations stored while the model ran, to be analysed elsewhere. “Look” shows the first stored tensor: a row per " +
      "token, a column per number.",
  ],
  circuit: [
    "A circle is a sublayer's output at one token. All numbers were measured by running the model with every other output at the baseline. A smaller set may exist; a share far above that of random sets speaks for a circuit.",
  ],
};
