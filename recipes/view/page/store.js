// The run as the page knows it: fetched once, then followed by a stream that says how much more there is.

export const store = { about: null, metrics: [], rollouts: [], byId: new Map(), version: null, lost: false };
const listeners = new Set();
let generation = null;
let busy = null;
let again = false;

export const get = (path) => answered(fetch(path));
export const post = (path, body) => answered(fetch(path, { method: "POST", body: JSON.stringify(body) }));

async function answered(request) {
  const response = await request;
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body;
}

/** Calls `listener` whenever there is more to see; returns the way to stop it. */
export function follow(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export async function begin() {
  store.about = await get("api/run");
  store.version = store.about.version;
  await catchUp();
  const events = new EventSource("api/events");
  events.onmessage = (event) => {
    store.version = JSON.parse(event.data);
    store.lost = false;
    catchUp();
  };
  events.onerror = () => {
    store.lost = true;
    tell();
  };
}

/** One at a time; what comes meanwhile is fetched after it. */
function catchUp() {
  if (busy) {
    again = true;
    return busy;
  }
  busy = fetchMore().finally(() => {
    busy = null;
    if (again) {
      again = false;
      catchUp();
    }
  });
  return busy;
}

async function fetchMore() {
  try {
    await Promise.all([moreMetrics(), moreRollouts()]);
  } catch {
    store.lost = true;
  }
  tell();
}

async function moreMetrics() {
  if (store.version.metrics < store.metrics.length) store.metrics = [];
  if (store.version.metrics === store.metrics.length) return;
  const { rows } = await get(`api/metrics?from=${store.metrics.length}`);
  store.metrics = store.metrics.concat(rows);
}

async function moreRollouts() {
  if (generation !== null && store.version.generation !== generation) forget();
  if (store.version.rollouts === store.rollouts.length && generation !== null) return;
  const found = await get(`api/rollouts?from=${store.rollouts.length}`);
  if (generation !== null && found.generation !== generation) {
    forget();
    return moreRollouts();
  }
  generation = found.generation;
  const added = found.rows.map((row) => Object.fromEntries(found.fields.map((name, k) => [name, row[k]])));
  store.rollouts = store.rollouts.concat(added);
  for (const row of added) store.byId.set(row.id, row);
}

function forget() {
  store.rollouts = [];
  store.byId.clear();
  generation = null;
}

function tell() {
  for (const listener of listeners) listener();
}
