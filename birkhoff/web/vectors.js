// Steering modules and SAEs of the server.
import { call } from "./api.js";

export async function loadVectors(store) {
  const result = await call("/v1/steering/modules");
  const modules = Array.isArray(result.modules)
    ? result.modules
    : Object.entries(result.modules ?? result).map(([name, rest]) => ({
        name,
        ...(typeof rest === "object" ? rest : {}),
      }));
  store.set({
    vectors: modules
      .filter((m) => (m.kind ?? "additive") === "additive")
      .map((m) => ({
        ...m,
        strength: m.strength ?? m.recommended_strength,
        title: m.hook
          ? `${m.name} (${m.hook}${m.layers ? ` ${[].concat(m.layers).join(",")}` : ""})`
          : m.name,
      })),
  });
  if (!store.state.vector && store.state.vectors.length) store.set({ vector: store.state.vectors[0].name });
}

export async function loadSaes(store) {
  const result = await call("/v1/saes");
  const saes = (result.saes ?? result.data ?? result).map((s) => ({
    ...s,
    title: s.hook ? `${s.name} (${s.hook} ${s.layer ?? ""}, ${s.view ?? ""})` : s.name,
  }));
  store.set({ saes, sae: store.state.sae ?? saes[0]?.name ?? null });
}
