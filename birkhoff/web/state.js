// The state every view starts from.
import { newRun } from "./store.js";

export const initialState = () => ({
  props: null,
  connected: false,
  theme: "light",
  conversation: [],
  draft: "",
  benchPrompt: "Tell me a story about a little fox.",
  edits: [],
  suggestEdit: true, // put a vector on the bench once the server has told which there are
  vectors: [],
  saes: [],
  sae: null,
  vector: null,
  settings: { temperature: 0.8, maxTokens: 120, seed: 7 },
  run: newRun(), // what the panels show: the run of the chat or of the bench, whichever page is open
  pin: null,
  runPage: "chat",
  aside: { run: newRun(), pin: null, asked: {}, answers: {} }, // the same of the other page
  scalar: "stream_norm",
  stream: "all",
  lensView: "head",
  asked: {},
  answers: {}, // by route: answers of the server that views show, kept for files
  frozen: false, // a saved file: there is no server
  featureOrder: "specific",
  captured: null,
  contrast: null,
  lineage: null,
  tint: "surprise",
  steerChat: false,
  live: false,
  sweep: null,
  featureChosen: null,
  dashboard: null,
  benchError: null,
  talkPage: "chat",
  lookPage: "inside",
});
