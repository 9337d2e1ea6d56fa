// Drawing. What comes in is figures and text; text goes in as text, never as HTML.

const number = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const seconds = (value) => (value < 1 ? `${number(value * 1000, 0)} ms` : `${number(value, 2)} s`);
export { number };

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** One of the two panes. Text is collected and drawn once a frame. */
export class Pane {
  constructor(root) {
    this.root = root;
    this.output = root.querySelector(".output");
    this.bar = root.querySelector(".bar > div");
    this.waiting = [];
    this.frame = 0;
  }

  clear(note) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.waiting = [];
    this.output.replaceChildren(...(note ? [element("p", "note", note)] : []));
    this.root.dataset.state = "";
    this.bar.style.width = "0";
    for (const figure of this.root.querySelectorAll("[data-figure]")) figure.textContent = "–";
  }

  state(name) {
    this.root.dataset.state = name;
  }

  add(pieces) {
    this.waiting.push(...pieces);
  }

  /** Draw what was added, and these figures, with the next frame. `most`: tokens at which the bar is full. */
  draw(tally, most) {
    this.latest = [tally, most];
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.drawNow();
    });
  }

  drawNow() {
    const output = this.output;
    const follows = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    output.querySelector(".note")?.remove();
    for (const [text, accepted] of this.waiting) {
      const kind = accepted ? "MARK" : "SPAN";
      if (output.lastChild?.nodeName === kind && !accepted) output.lastChild.append(text);
      else output.append(element(kind.toLowerCase(), "", text));
    }
    this.waiting = [];
    if (follows) output.scrollTop = output.scrollHeight;
    const [tally, most] = this.latest;
    const show = (name, text) => (this.root.querySelector(`[data-figure=${name}]`).textContent = text);
    this.bar.style.width = `${Math.min(100, (100 * tally.tokens) / most)}%`;
    show("rate", tally.rate === null ? "–" : number(tally.rate, 1));
    show("tokens", number(tally.tokens, 0));
    show("passes", number(tally.passes, 0));
    show("first", tally.first === null ? "–" : seconds(tally.first));
    show("total", tally.last === null ? "–" : seconds(tally.last));
  }
}

/** The card about drafts: figures, survival, passes. */
export class Drafts {
  constructor() {
    this.survival = document.getElementById("survival");
    this.ribbon = document.getElementById("ribbon");
    this.frame = 0;
    this.drawn = 0;
    this.most = 1;
  }

  clear(note) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.drawn = 0;
    this.most = 1;
    this.ribbon.replaceChildren();
    this.ribbon.setAttribute("aria-label", "No passes yet");
    this.survival.replaceChildren(element("li", "empty", note));
    for (const id of ["length", "accepted", "drafted", "rate"]) document.getElementById(id).textContent = "–";
  }

  draw(tally) {
    this.latest = tally;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.drawNow(this.latest);
    });
  }

  drawNow(tally) {
    if (!tally.steps.length) return;
    const show = (id, text) => (document.getElementById(id).textContent = text);
    show("length", number(tally.acceptanceLength, 2));
    show("accepted", number(tally.accepted, 0));
    show("drafted", number(tally.drafted, 0));
    show("rate", `${number((100 * tally.accepted) / tally.drafted, 0)} %`);
    this.drawSurvival(tally.survival);
    this.drawRibbon(tally);
  }

  drawSurvival(rates) {
    this.survival.querySelector(".empty")?.remove();
    while (this.survival.children.length > rates.length) this.survival.lastChild.remove();
    rates.forEach((rate, position) => {
      let item = this.survival.children[position];
      if (!item) {
        item = element("li");
        item.append(element("span", "place", `${position + 1}`), element("span", "track"), element("span", "share"));
        item.children[1].append(element("span", "fill"));
        this.survival.append(item);
      }
      item.children[1].firstChild.style.width = `${100 * rate}%`;
      item.children[2].textContent = `${number(100 * rate, 0)} %`;
    });
  }

  drawRibbon(tally) {
    const most = Math.max(this.most, ...tally.steps.slice(this.drawn).map(([drafted]) => drafted));
    if (most > this.most) {
      this.most = most;
      this.ribbon.style.setProperty("--most", most);
    }
    for (const [drafted, accepted] of tally.steps.slice(this.drawn)) {
      const pass = element("span", "pass");
      pass.style.setProperty("--drafted", drafted);
      pass.style.setProperty("--accepted", accepted);
      pass.title = `${accepted} of ${drafted} accepted`;
      this.ribbon.append(pass);
    }
    this.drawn = tally.steps.length;
    this.ribbon.scrollLeft = this.ribbon.scrollWidth;
    const all = tally.steps.filter(([drafted, accepted]) => drafted === accepted).length;
    const none = tally.steps.filter(([, accepted]) => accepted === 0).length;
    this.ribbon.setAttribute("aria-label", `${tally.steps.length} passes with drafts: ${all} accepted in whole, ${none} not at all`);
  }
}
