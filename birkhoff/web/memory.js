// Attention of the pinned token over the text, and the experts it was routed to.
import { amount, canvasOf, css, ink, isDark } from "./colour.js";
import { empty, fill, h, hideTip, panel, short, showTip, exportButtons } from "./dom.js";
import { askAboutPin, notHere, tokenIds, pinnedFrame, pythonScript } from "./pinned.js";
import { tokensOf } from "./store.js";

const ROW = 20,
  LEFT = 84,
  RIGHT = 92;

export function memoryPanel(store) {
  const body = h("div", { class: "stack" });
  const node = panel(
    "Attention memory map",
    "Attention of the pinned token, one line per layer: the sliding window token by token, " +
      "compressed blocks as wide as the text they cover, and the share of the sink on the right. " +
      "CSA layers attend only to the blocks their indexer selects.",
    {
      wide: true,
      name: "memory",
      tools: exportButtons(
        () => current() ?? {},
        () =>
          pythonScript(
            `token_ids = ${JSON.stringify(tokenIds(store.state, store.state.pin?.position ?? -1))}`,
            "for layer, memory in enumerate(engine.attention(token_ids)):",
            "    print(layer, memory.ratio, memory.window, memory.entries, memory.sink)",
          ),
      ),
    },
    body,
  );
  const draw = (result) => {
    const length = result.position + 1,
      width = Math.max(300, body.clientWidth || 600),
      inner = width - LEFT - RIGHT,
      each = inner / length;
    const canvas = canvasOf(
        width,
        result.layers.length * ROW + 18,
        `attention of the pinned token in ${result.layers.length} layers`,
      ),
      context = canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const spans = [];
    result.layers.forEach((layer, y) => {
      const top = y * ROW;
      context.fillStyle = ink("soft");
      context.fillText(`${y} ${layer.kind}`, 2, top + ROW / 2);
      context.fillStyle = ink("wash");
      context.fillRect(LEFT, top + 2, inner, ROW - 4);
      const paint = (span, upper, tall) => {
        context.fillStyle = css(amount(Math.min(1, Math.sqrt(span.weight) * 1.15)));
        context.fillRect(
          LEFT + span.from * each,
          top + upper,
          Math.max((span.to - span.from) * each - (span.to - span.from > 1 ? 1 : 0), 1.5),
          tall,
        );
        spans.push({ ...span, layer: y, top: top + upper, tall, kind: layer.kind });
      };
      layer.blocks.forEach((span) => paint(span, 2, ROW / 2 - 2));
      layer.window.forEach((span) =>
        paint(span, layer.entries ? ROW / 2 : 2, layer.entries ? ROW / 2 - 2 : ROW - 4),
      );
      context.fillStyle = ink("soft");
      context.fillText(
        `sink ${(layer.sink * 100).toFixed(0)} %${layer.entries ? `  ${layer.chosen}/${layer.entries}` : ""}`,
        width - RIGHT + 6,
        top + ROW / 2,
      );
    });
    context.fillStyle = ink("soft");
    context.fillText("first token", LEFT, result.layers.length * ROW + 9);
    context.textAlign = "right";
    context.fillText("pinned token", LEFT + inner, result.layers.length * ROW + 9);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(),
        x = (event.clientX - box.left - LEFT) / each,
        y = event.clientY - box.top;
      const span = spans.find((s) => x >= s.from && x < s.to && y >= s.top && y < s.top + s.tall);
      if (!span) return hideTip();
      const text = tokensOf(store.state.run, store.state.pin?.twin)
        .slice(span.from, span.to)
        .map((t) => t.text)
        .join("");
      showTip(
        event.clientX,
        event.clientY,
        h(
          "div",
          {},
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
      h(
        "p",
        { class: "note" },
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
  const body = h("div", { class: "stack" });
  const node = panel(
    "Experts",
    "One line per layer, one box per routed expert; selected experts are coloured by their weight. Layers " +
      "marked # route by a hash of the token id.",
    {
      name: "experts",
      tools: exportButtons(
        () => pinnedFrame(store.state)?.experts ?? [],
        () =>
          pythonScript(
            `trace = engine.trace(${JSON.stringify(tokenIds(store.state))}, hooks=["moe_topk"])`,
            `print(trace["moe_topk", 0][${store.state.pin?.position ?? -1}])  # expert id, weight`,
          ),
      ),
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
      width = Math.max(220, Math.min(body.clientWidth || 340, 560)),
      size = Math.max(2, Math.min(18, (width - left) / count)),
      tall = Math.max(size, 13);
    const canvas = canvasOf(
        left + size * count,
        tall * frame.experts.length,
        "experts chosen in every layer",
      ),
      context = canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const most = Math.max(...frame.experts.flat().map(([, w]) => w), 1e-9);
    frame.experts.forEach((chosen, layer) => {
      context.fillStyle = ink("soft");
      context.fillText(`${hashed.has(layer) ? "#" : " "}layer ${layer}`, 2, layer * tall + tall / 2);
      for (let e = 0; e < count; e++) {
        context.fillStyle = ink("wash");
        context.fillRect(left + e * size, layer * tall + 1, size - 1, tall - 2);
      }
      for (const [id, weight] of chosen) {
        context.fillStyle = css(amount(0.2 + 0.8 * (weight / most)));
        context.fillRect(left + id * size, layer * tall + 1, size - 1, tall - 2);
      }
    });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(),
        layer = Math.floor((event.clientY - box.top) / tall);
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
