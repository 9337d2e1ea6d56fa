// The page: settings, the race, its replay.
import { ServerError, Tally, compare, get, run } from "./race.js";
import { Drafts, Pane, number } from "./view.js";

const at = (id) => document.getElementById(id);
const EXAMPLES = {
  Code: "Write a Python function that returns the n-th Fibonacci number, with a docstring and type hints.",
  Arithmetic: "Tom has 3 boxes of 12 pencils. He gives away 7 and buys 2 more boxes. How many pencils has he now? Think step by step.",
  List: "Name the planets of the solar system, one per line, each with one short fact.",
  Chat: "Explain to a child how a bicycle stays upright.",
};

const panes = { plain: new Pane(at("plain")), spec: new Pane(at("spec")) };
const drafts = new Drafts();
let server = null; // /server_info
let running = null; // AbortController of the race
let replaying = 0; // frame of the replay
let recordings = null; // of the last race: {plain: [events], spec: [events]}
let races = 0;

// ---- the key, which lives as long as the tab

const storage = {
  get key() {
    return sessionStorage.getItem("paceline-key") ?? "";
  },
  set key(value) {
    sessionStorage.setItem("paceline-key", value);
  },
};

/** Ask for a key; false when the reader does not give one. */
function askForKey() {
  const dialog = at("key-dialog");
  at("key-wrong").hidden = !storage.key;
  at("key").value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = dialog.returnValue === "use";
        if (given) storage.key = at("key").value;
        resolve(given);
      },
      { once: true },
    );
  });
}

/** What `work` returns, with a key that the server takes. */
async function withKey(work) {
  for (;;) {
    try {
      return await work(storage.key);
    } catch (error) {
      if (!(error instanceof ServerError) || error.status !== 401) throw error;
      at("key-button").hidden = false;
      if (!(await askForKey())) throw error;
    }
  }
}

// ---- starting up

async function connect() {
  fail(null);
  try {
    server = await withKey((key) => get("server_info", key));
  } catch (error) {
    at("machine").textContent = "Not connected";
    fail(error);
    return;
  }
  const { engine, model_names: names } = server;
  const most = engine.num_speculative_tokens;
  at("machine").textContent =
    `${names[0]} · ${engine.dtype} · ${engine.isa}, ${engine.threads} thread${engine.threads === 1 ? "" : "s"}` +
    (engine.speculation ? ` · drafts: ${engine.speculation}` : "");
  at("model").replaceChildren(...names.map((name) => new Option(name, name)));
  at("max-tokens").max = engine.max_model_len - 1;
  at("max-tokens").value = Math.min(at("max-tokens").value, engine.max_model_len - 1);
  const lengths = Array.from({ length: most }, (_, i) => new Option(`${i + 1}`, `${i + 1}`));
  at("drafts").replaceChildren(new Option("automatic", ""), ...lengths);
  at("drafts").disabled = !engine.speculation;
  drafts.clear(engine.speculation ? "Start a race to see it." : "This server has no drafter.");
  panes.plain.clear("The model alone.");
  panes.spec.clear(
    engine.speculation
      ? `A drafter proposes up to ${most} tokens, the model checks them in one pass.`
      : "This server runs without a drafter, so there is nothing to race against. Start it without --no-speculation, or with --speculative-config.",
  );
}

function fail(error) {
  at("error").hidden = error === null;
  at("error").textContent = error?.message ?? "";
}

function say(text) {
  at("status").textContent = text;
}

// ---- the race

/** Any seed will do, as long as both runs have the same. */
function chosenSeed() {
  const given = at("seed").value;
  return given === "" ? Math.floor(Math.random() * 2 ** 32) : Number(given);
}

function request() {
  const shared = {
    model: at("model").value,
    messages: [{ role: "user", content: at("prompt").value }],
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
    seed: chosenSeed(),
  };
  const length = at("drafts").value;
  return {
    plain: { ...shared, num_speculative_tokens: 0 },
    spec: length === "" ? shared : { ...shared, num_speculative_tokens: Number(length) },
  };
}

/** One run into its pane; its tally, and its events in `record`. */
async function compete(name, body, record, signal) {
  const pane = panes[name];
  const tally = new Tally();
  pane.clear();
  pane.state("running");
  await withKey(async (key) => {
    for await (const event of run(body, key, signal)) {
      record.push(event);
      show(name, tally, event, body.max_tokens);
    }
  });
  pane.drawNow();
  pane.state("done");
  return tally;
}

function show(name, tally, event, most) {
  tally.add(event);
  if (event.type === "step") panes[name].add(event.pieces);
  panes[name].draw(tally, most);
  if (name === "spec") drafts.draw(tally);
}

async function race() {
  if (running || !server || !at("form").reportValidity()) return;
  stopReplay();
  fail(null);
  at("verdict").hidden = true;
  const bodies = request();
  const names = server.engine.speculation ? ["plain", "spec"] : ["plain"];
  if (races++ % 2) names.reverse();
  const together = document.querySelector("[name=order]:checked").value === "together";
  const found = {};
  const records = { plain: [], spec: [] };
  recordings = null;
  running = new AbortController();
  at("start").disabled = true;
  at("stop").disabled = false;
  if (names.length > 1) drafts.clear("Waiting for the first drafts.");
  for (const name of names) panes[name].clear(together || name === names[0] ? "" : "Runs next.");
  say("Race started");
  try {
    const one = async (name) => (found[name] = await compete(name, bodies[name], records[name], running.signal));
    if (together) await Promise.all(names.map(one));
    else for (const name of names) await one(name);
    if (names.length > 1) {
      recordings = { ...records, most: bodies.plain.max_tokens };
      verdict(found, together);
    }
  } catch (error) {
    running.abort();
    for (const name of names) if (!found[name]) panes[name].state("");
    if (error.name === "AbortError") say("Stopped");
    else fail(error);
  } finally {
    running = null;
    at("start").disabled = false;
    at("stop").disabled = true;
  }
}

function verdict({ plain, spec }, together) {
  const { same, at: place } = compare(plain, spec);
  const ratio = plain.rate && spec.rate ? spec.rate / plain.rate : null;
  at("factor").textContent = ratio === null ? "–" : `${number(ratio, 2)}×`;
  const words = ratio !== null && ratio < 1 ? "the speed of plain decoding" : "as fast as plain decoding";
  at("factor-text").textContent = together ? `${words}, in shared passes` : words;
  at("same").textContent = same
    ? `✓ Same answer, token for token (${place} tokens)`
    : `✗ The answers differ from token ${place + 1} on`;
  at("same").className = same ? "good" : "bad";
  at("verdict").hidden = false;
  say(`${at("factor").textContent} ${at("factor-text").textContent}. ${at("same").textContent.slice(2)}`);
}

function stop() {
  running?.abort();
  stopReplay();
}

// ---- the replay: both recordings at once, at the speed at which they were made

function replay() {
  if (running || !recordings) return;
  stopReplay();
  const { most } = recordings;
  drafts.clear("");
  const lanes = ["plain", "spec"].map((name) => {
    panes[name].clear();
    panes[name].state("running");
    return { name, tally: new Tally(), events: recordings[name].filter((event) => event.type !== "start"), next: 0 };
  });
  at("stop").disabled = false;
  const begin = performance.now();
  const frame = () => {
    const now = (performance.now() - begin) / 1000;
    for (const lane of lanes) {
      const before = lane.next;
      while (lane.next < lane.events.length && (lane.events[lane.next].seconds ?? 0) <= now) {
        show(lane.name, lane.tally, lane.events[lane.next++], most);
      }
      if (before < lane.next && lane.next === lane.events.length) panes[lane.name].state("done");
    }
    if (lanes.some((lane) => lane.next < lane.events.length)) replaying = requestAnimationFrame(frame);
    else stopReplay();
  };
  replaying = requestAnimationFrame(frame);
}

/** End a replay, at its end or before it: then the whole of both recordings is shown. */
function stopReplay() {
  if (!replaying) return;
  cancelAnimationFrame(replaying);
  replaying = 0;
  if (!running) at("stop").disabled = true;
  drafts.clear("");
  for (const name of ["plain", "spec"]) {
    const tally = new Tally();
    panes[name].clear();
    for (const event of recordings[name]) show(name, tally, event, recordings.most);
    panes[name].state("done");
  }
}

// ---- theme: as the system, or one of both

const THEMES = { system: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(name) {
  const [sign, words] = THEMES[name];
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("paceline-theme", name);
  at("theme").textContent = sign;
  at("theme").title = `Theme: ${words}`;
  at("theme").setAttribute("aria-label", `Theme: ${words}`);
}

// ---- wiring

for (const [name, text] of Object.entries(EXAMPLES)) {
  const chip = document.createElement("button");
  chip.type = "button";
  chip.className = "chip";
  chip.textContent = name;
  chip.addEventListener("click", () => {
    at("prompt").value = text;
    at("prompt").focus();
  });
  document.querySelector(".examples").append(chip);
}
at("prompt").value = EXAMPLES.Code;
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  race();
});
at("stop").addEventListener("click", stop);
at("replay").addEventListener("click", replay);
at("key-button").addEventListener("click", async () => {
  if (await askForKey()) connect();
});
at("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(localStorage.getItem("paceline-theme") ?? "system") + 1) % names.length]);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    race();
  }
  if (event.key === "Escape" && !at("key-dialog").open) stop();
});
setTheme(localStorage.getItem("paceline-theme") in THEMES ? localStorage.getItem("paceline-theme") : "system");
connect();
