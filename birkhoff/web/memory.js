// Attention of the pinned token over the text, and the experts it was routed to.
import { amount, css, ink, isDark, paintedCanvas, textColourOn } from "./colour.js";
import { empty, fill, h, hideTip, note, panel, short, showTip, stack } from "./dom.js";
import { askAboutPin, notHere, pinnedFrame } from "./pinned.js";
import { expertsPython, memoryPython } from "./python.js";
import { tokensOf } from "./store.js";

const ROW = 20,
  LEFT = 84,
  RIGHT = 92;

/** What a layer of this kind attends to. */
function kindHint(kind) {
  const hints = {
    window: "sliding window only: the nearest tokens, one by one",
    csa: "compressed sparse attention: the window, and of the blocks of 4 tokens those its indexer selects",
    hca: "heavily compressed attention: the window, and every block of 128 tokens",
  };
  return hints[kind] ?? `the window and ${kind} tokens`;
}

export function memoryPanel(store) {
  const body = stack();
  const node = panel(
    "Attention memory map",
    "Attention of the pinned token, one line per layer: the sliding window token by token, " +
      "compressed blocks as wide as the text they cover, and the share of the sink on the right. " +
      "CSA layers attend only to the blocks their indexer selects.",
    { wide: true, name: "memory", data: () => current() ?? {}, python: () => memoryPython(store.state) },
    body,
  );
  const draw = (result) => {
    const length = result.position + 1,
      width = Math.max(300, body.clientWidth || 600),
      inner = width - LEFT - RIGHT,
      each = inner / length;
    const spans = result.layers.flatMap((layer, y) => {
      const at = (upper, tall) => (span) => ({ ...span, layer: y, top: y * ROW + upper, tall, kind: layer.kind });
      const lower = layer.entries ? at(ROW / 2, ROW / 2 - 2) : at(2, ROW - 4);
      return [...layer.blocks.map(at(2, ROW / 2 - 2)), ...layer.window.map(lower)];
    });
    const paint = (context) => {
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.textAlign = "left";
      result.layers.forEach((layer, y) => {
        const middle = y * ROW + ROW / 2;
        context.fillStyle = ink("soft");
        context.fillText(`${y} ${layer.kind}`, 2, middle);
        context.fillText(
          `sink ${(layer.sink * 100).toFixed(0)} %${layer.entries ? `  ${layer.chosen}/${layer.entries}` : ""}`,
          width - RIGHT + 6,
          middle,
        );
        context.fillStyle = ink("wash");
        context.fillRect(LEFT, y * ROW + 2, inner, ROW - 4);
      });
      for (const { from, to, weight, top, tall } of spans) {
        context.fillStyle = css(amount(Math.min(1, Math.sqrt(weight) * 1.15)));
        context.fillRect(LEFT + from * each, top, Math.max((to - from) * each - (to - from > 1 ? 1 : 0), 1.5), tall);
      }
      context.fillStyle = ink("soft");
      context.fillText("first token", LEFT, result.layers.length * ROW + 9);
      context.textAlign = "right";
      context.fillText("pinned token", LEFT + inner, result.layers.length * ROW + 9);
    };
    const label = `attention of the pinned token in ${result.layers.length} layers`,
      canvas = paintedCanvas(width, result.layers.length * ROW + 18, label, paint);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(),
        x = (event.clientX - box.left - LEFT) / each,
        y = event.clientY - box.top;
      const span = spans.find((s) => x >= s.from && x < s.to && y >= s.top && y < s.top + s.tall);
      if (!span) {
        const layer = result.layers[Math.floor(y / ROW)];
        if (!layer || x >= 0) return hideTip();
        showTip(event.clientX, event.clientY, h("div", {}, h("strong", {}, layer.kind), `: ${kindHint(layer.kind)}`));
        return;
      }
      const text = tokensOf(store.state.run, store.state.pin?.twin)
        .slice(span.from, span.to)
        .map((t) => t.text)
        .join("");
      showTip(
        event.clientX,
        event.clientY,
        h("div", {},
          `layer ${span.layer}, `,
          span.to - span.from > 1 ? `block of ${span.to - span.from} tokens` : "one token",
          `: ${(span.weight * 100).toFixed(1)} %`,
        ),
        h("div", { class: "mono" }, short(text, 120)),
      );
    });
    canvas.addEventListener("pointerleave", hideTip);
    fill(
      body,
      h("div", { class: "scroll" }, canvas),
      h("dl", { class: "kinds note" },
        [...new Set(result.layers.map((layer) => layer.kind))].map((kind) => [
          h("dt", { class: "mono" }, kind),
          h("dd", {}, kindHint(kind)),
        ]),
      ),
      note(
        "Upper half of a line: compressed blocks; lower half: the window. " +
          `${isDark() ? "Lighter" : "Darker"} means more. Right: sink share, selected / all blocks.`,
      ),
    );
  };
  const question = {
    path: "/v1/interp/attention",
    hint: "Pin a token to see its attention.",
    v4: "Attention over compressed blocks",
    delay: 90,
  };
  const current = askAboutPin(store, body, question, draw);
  return node;
}

export function expertPanel(store) {
  const body = stack();
  const node = panel(
    "Experts",
    "One line per layer, one box per routed expert; selected experts are coloured by their weight. Layers " +
      "marked # route by a hash of the token id.",
    {
      name: "experts",
      data: () => pinnedFrame(store.state)?.experts ?? [],
      python: () => expertsPython(store.state),
    },
    body,
  );
  const draw = (state) => {
    const frame = pinnedFrame(state);
    if (!frame?.experts) {
      const hint = "Pin a token to see its experts.";
      fill(body, empty(notHere(state, "Experts of every token") ?? hint));
      return;
    }
    const count = state.props?.num_experts ?? Math.max(...frame.experts.flat().map(([id]) => id)) + 1,
      hashed = new Set(state.props?.hash_routed_layers ?? []);
    const left = 58,
      head = 14,
      width = Math.max(220, Math.min(body.clientWidth || 340, 560)),
      size = Math.max(2, Math.min(20, (width - left) / count)),
      tall = Math.max(size, 14),
      most = Math.max(...frame.experts.flat().map(([, w]) => w), 1e-9);
    const paint = (context) => {
      context.textBaseline = "middle";
      context.font = "10px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillStyle = ink("soft");
      const every = Math.ceil(16 / size);
      for (let e = 0; e < count; e += every) context.fillText(String(e), left + (e + 0.5) * size - 0.5, head / 2);
      frame.experts.forEach((chosen, layer) => {
        const top = head + layer * tall;
        context.textAlign = "left";
        context.font = "11px system-ui, sans-serif";
        context.fillStyle = ink("soft");
        context.fillText(`${hashed.has(layer) ? "#" : " "}layer ${layer}`, 2, top + tall / 2);
        for (let e = 0; e < count; e++) {
          context.fillStyle = ink("wash");
          context.fillRect(left + e * size, top + 1, size - 1, tall - 2);
        }
        context.textAlign = "center";
        context.font = "10px system-ui, sans-serif";
        for (const [id, weight] of chosen) {
          const rgb = amount(0.2 + 0.8 * (weight / most));
          context.fillStyle = css(rgb);
          context.fillRect(left + id * size, top + 1, size - 1, tall - 2);
          context.fillStyle = textColourOn(rgb);
          if (size >= 13) context.fillText(String(id), left + (id + 0.5) * size - 0.5, top + tall / 2);
        }
      });
    };
    const canvas = paintedCanvas(
      left + size * count,
      head + tall * frame.experts.length,
      "experts chosen in every layer",
      paint,
    );
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(),
        layer = Math.floor((event.clientY - box.top - head) / tall);
      if (!frame.experts[layer]) return hideTip();
      showTip(
        event.clientX,
        event.clientY,
        h("strong", {}, `layer ${layer}${hashed.has(layer) ? ", hash-routed" : ""}`),
        frame.experts[layer].map(([id, weight]) =>
          h("div", { class: "mono" }, `expert ${id}: ${weight.toFixed(3)}`),
        ),
      );
    });
    canvas.addEventListener("pointerleave", hideTip);
    fill(body, h("div", { class: "scroll" }, canvas));
  };
  store.on(["run", "pin", "theme", "props"], draw);
  return node;
}
