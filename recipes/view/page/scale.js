// Colours of numbers: what a token or a turn is worth at a glance. The numbers themselves are always there to be read.

/** Signal → its words, how it is coloured, and how a value reads. */
export const SIGNALS = {
  logprob: { name: "log-probability", unit: "nats", kind: "low" },
  advantage: { name: "advantage", unit: "", kind: "around", middle: 0 },
  value: { name: "value", unit: "", kind: "range" },
  ratio: { name: "ratio", unit: "", kind: "around", middle: 1 },
};

const STRONGEST = 0.62;

/** The extent that colours are spread over, so that one outlier does not grey out all others. */
export function extent(signal, values) {
  const seen = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!seen.length) return null;
  const at = (share) => seen[Math.round(share * (seen.length - 1))];
  const { kind, middle } = SIGNALS[signal];
  if (kind === "low") return { low: Math.min(-0.5, at(0.02)), high: 0 };
  if (kind === "range") return { low: at(0.02), high: at(0.98) };
  const reach = Math.max(1e-6, ...[at(0.02), at(0.98)].map((v) => Math.abs(v - middle)));
  return { low: middle - reach, high: middle + reach };
}

/** A CSS background for a value, or null for one that needs none. */
export function colour(signal, value, range) {
  if (!range || !Number.isFinite(value)) return null;
  const { kind, middle } = SIGNALS[signal];
  const within = (x) => Math.max(0, Math.min(1, x));
  if (kind === "low") return ink("warm", within(value / range.low));
  if (kind === "range") return ink("cool", within((value - range.low) / (range.high - range.low || 1)));
  const share = (value - middle) / (range.high - middle);
  return ink(share < 0 ? "warm" : "cool", within(Math.abs(share)));
}

const ink = (name, share) => (share < 0.02 ? null : `rgb(var(--${name}) / ${(share * STRONGEST).toFixed(3)})`);
