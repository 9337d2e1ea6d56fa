// Talking to the server, and the figures of a run. Nothing here touches the page.

/** An answer of the server other than 200, or an error event inside a stream. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refused(answer) {
  const text = await answer.text();
  let message = text.slice(0, 300) || answer.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not this server's JSON: a proxy's page, as it is
  }
  return new ServerError(answer.status, message);
}

/** GET a JSON document. Paths are relative to the page, so that it works below a prefix too. */
export async function get(path, key) {
  const answer = await fetch(path, { headers: headers(key) });
  if (!answer.ok) throw await refused(answer);
  return answer.json();
}

/** The events of one run, as the server sends them (docs/api.md). */
export async function* run(body, key, signal) {
  const answer = await fetch("playground/stream", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw await refused(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError(0, "the connection ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(0, event.error.message);
      yield event;
    }
  }
}

/** What a run has done so far: fed with its events, in order. */
export class Tally {
  constructor() {
    this.tokens = 0;
    this.passes = 0; // passes of the model that made tokens
    this.first = null; // seconds to the first token
    this.firstTokens = 0; // tokens that came with it
    this.last = null;
    this.end = null; // the server's own figures, once it is over
    this.histogram = []; // passes with drafts, by accepted tokens
    this.drafted = 0;
    this.steps = []; // [drafted, accepted] of passes with drafts
  }

  add(event) {
    if (event.type === "end") this.end = event;
    if (event.type !== "step" || !event.tokens) return;
    if (this.first === null) {
      this.first = event.seconds;
      this.firstTokens = event.tokens;
    }
    this.last = event.seconds;
    this.tokens += event.tokens;
    for (const [drafted, accepted] of event.passes) {
      this.passes += 1;
      if (!drafted) continue;
      while (this.histogram.length <= drafted) this.histogram.push(0);
      this.histogram[accepted] += 1;
      this.drafted += drafted;
      this.steps.push([drafted, accepted]);
    }
  }

  /** Tokens per second from the first token on; null before there is a second one. */
  get rate() {
    const own = this.end?.metrics.tokens_per_second;
    if (own) return own;
    const seconds = this.last - this.first;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  get accepted() {
    return this.histogram.reduce((sum, count, accepted) => sum + count * accepted, 0);
  }

  /** 1 + accepted / passes with drafts; null without drafts. */
  get acceptanceLength() {
    return this.steps.length ? 1 + this.accepted / this.steps.length : null;
  }

  /** Share of drafts accepted up to and including each position. */
  get survival() {
    let survivors = 0;
    const rates = [];
    for (let accepted = this.histogram.length - 1; accepted > 0; accepted--) {
      survivors += this.histogram[accepted];
      rates.push(survivors / this.steps.length);
    }
    return rates.reverse();
  }
}

/** Whether two finished runs made the same tokens: {same, at}, `at` the first place where they differ. */
export function compare(a, b) {
  const [x, y] = [a.end.token_ids, b.end.token_ids];
  const length = Math.max(x.length, y.length);
  for (let i = 0; i < length; i++) {
    if (x[i] !== y[i]) return { same: false, at: i };
  }
  return { same: true, at: length };
}
