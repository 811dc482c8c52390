// The store: views read `store.state`, call `store.set({...})` and subscribe with `store.on(names, f)`.
// Changes within one animation frame are delivered once, so token streams do not cause extra redraws.

export function makeStore(initial) {
  const listeners = new Set();
  const changed = new Set();
  let waiting = false;
  const store = {
    state: initial,
    set(changes) {
      Object.assign(store.state, changes);
      for (const name of Object.keys(changes)) changed.add(name);
      if (waiting) return;
      waiting = true;
      const notify = () => {
        if (!waiting) return;
        waiting = false;
        const names = new Set(changed);
        changed.clear();
        for (const { on, listener } of [...listeners])
          if (on.some((name) => names.has(name))) listener(store.state);
      };
      requestAnimationFrame(notify);
      setTimeout(notify, 120); // a page in the background gets no frames
    },
    on(names, listener, now = true) {
      const entry = { on: names, listener };
      listeners.add(entry);
      if (now) listener(store.state);
      return () => listeners.delete(entry);
    },
  };
  return store;
}

/** A new run. Positions count the whole text: the prompt, then the output. */
export function newRun() {
  return {
    status: "idle",
    id: null,
    prompt: [],
    tokens: [],
    twin: null,
    reasoning: "",
    kept: 0, // tokens of the answer that were taken over from the one it branched from
    frames: new Map(),
    twinFrames: new Map(),
    error: null,
    timings: null,
    warnings: [],
  };
}

/** All tokens of a run or of its unsteered twin, in order of position. */
export function tokensOf(run, twin = false) {
  const answer = twin ? (run.twin?.tokens ?? []) : run.tokens;
  return [...run.prompt, ...answer];
}

/** The order of features: densities, which "specific" needs, come with the descriptions of a dictionary. */
export function orderOf({ saes, sae, featureOrder }) {
  return saes?.find((s) => s.name === sae)?.described ? featureOrder : "strength";
}
