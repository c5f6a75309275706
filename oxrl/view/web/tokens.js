// Tokens of an answer, coloured by one of their numbers. Each level also has an underline of its own, so that nothing is
// shown by colour alone. Only the chunks near the window are built: an answer may have 100,000 tokens.

const CHUNK_LEAST = 150; // tokens, after which a line break ends a chunk
const CHUNK_MOST = 400;

const gapOf = (tokens, at) => {
  const [ours, sampled] = [tokens.policy_logprob?.[at], tokens.sampler_logprob?.[at]];
  return isNumber(ours) && isNumber(sampled) ? ours - sampled : null;
};

/** What tokens can be coloured by. `signed`: both ways from a middle; else from nothing to much. */
const COLOURS = {
  logprob: {
    label: "log-prob", help: "of the policy, else of the sampler: the stronger, the less likely the token was",
    value: (tokens, at) => tokens.policy_logprob?.[at] ?? tokens.sampler_logprob?.[at], level: (value) => -value,
  },
  gap: { label: "gap", help: "log-prob of the policy minus that of the sampler", signed: true, value: gapOf },
  advantage: { label: "advantage", help: "what credit assignment gave the token", signed: true, value: (tokens, at) => tokens.advantage?.[at] },
  ratio: {
    label: "ratio", help: "p / p of the sampler; a box is clipped: it has no gradient", signed: true,
    value: (tokens, at) => tokens.ratio?.[at], level: (value) => Math.log(Math.max(value, 1e-12)),
  },
  gradient: { label: "gradient", help: "derivative of the loss with respect to the log-prob", signed: true, value: (tokens, at) => tokens.gradient?.[at] },
  version: { label: "version", help: "of the weights that sampled the token", kinds: true, value: (tokens, at) => tokens.version?.[at] },
  mask: { label: "mask", help: "whether the token is trained", kinds: true, value: (tokens, at) => (tokens.mask ? Number(Boolean(tokens.mask[at])) : null) },
};

/** The colours of which the tokens have numbers. */
function colourNames(tokens) {
  const count = tokens.ids?.length ?? 0;
  return Object.keys(COLOURS).filter((name) => {
    for (let at = 0; at < count; at += 1) if (isNumber(COLOURS[name].value(tokens, at))) return true;
    return false;
  });
}

/** A function from a token's position to the class of its level, and the legend. */
function colouring(tokens, name) {
  const colour = COLOURS[name];
  const values = tokens.ids.map((_, at) => colour.value(tokens, at));
  if (colour.kinds) return kindColouring(colour, name, values);
  const level = colour.level ?? ((value) => value);
  const sizes = values.filter(isNumber).map((value) => Math.abs(level(value)));
  const top = quantile(sizes.filter((size) => size > 0), 0.99) || 1;
  const grade = (value) => Math.min(4, Math.ceil((Math.abs(level(value)) / top) * 4 - 1e-6));
  const classOf = (at) => {
    if (!isNumber(values[at])) return "none";
    const side = colour.signed && level(values[at]) < 0 ? "minus" : "plus";
    return grade(values[at]) ? `${colour.signed ? side : "much"}-${grade(values[at])}` : "";
  };
  const samples = colour.signed
    ? [["minus-4", `down to −${short(top)}`], ["minus-2", "less"], ["", "0"], ["plus-2", "more"], ["plus-4", `up to ${short(top)}`]]
    : [["", "0"], ["much-2", ""], ["much-4", `−${short(top)}`]];
  return { classOf, values, samples: name === "ratio" ? ratioSamples(top) : samples };
}

function ratioSamples(top) {
  const [low, high] = [short(Math.exp(-top)), short(Math.exp(top))];
  return [["minus-4", low], ["minus-2", "below 1"], ["", "1"], ["plus-2", "above 1"], ["plus-4", high], ["clipped", "clipped"]];
}

function kindColouring(colour, name, values) {
  const kinds = [...new Set(values.filter(isNumber))].sort((a, b) => a - b);
  const style = (value) => (name === "mask" ? (value ? "kind-1" : "masked") : `kind-${kinds.indexOf(value) % 6}`);
  const label = (value) => (name === "mask" ? (value ? "trained" : "not trained") : `version ${value}`);
  return {
    values, classOf: (at) => (isNumber(values[at]) ? style(values[at]) : "none"),
    samples: kinds.slice(0, 12).map((value) => [style(value), label(value)]),
  };
}

/** The text of a token; one without a text of its own shows its id. */
function pieceOf(tokens, at) {
  return tokens.pieces ? tokens.pieces[at] || "∅" : `${tokens.ids[at]} `;
}

/** [start, end) of chunks, which end at a line break where there is one. */
function chunked(tokens) {
  const chunks = [];
  let start = 0;
  for (let at = 0; at < tokens.ids.length; at += 1) {
    const size = at + 1 - start;
    if (size >= CHUNK_MOST || (size >= CHUNK_LEAST && pieceOf(tokens, at).includes("\n"))) {
      chunks.push([start, at + 1]);
      start = at + 1;
    }
  }
  if (start < tokens.ids.length) chunks.push([start, tokens.ids.length]);
  return chunks;
}

/** The first token of each row -> the row's number, if the answer became several. */
function rowStarts({ rows }) {
  const starts = new Map();
  let start = 0;
  for (const [number, length] of (rows?.length > 1 ? rows : []).entries()) {
    starts.set(start, number + 1);
    start += length;
  }
  return starts;
}

/** The tokens as an element: {element, recolour(name), numbers(on), select(at)}. */
class TokenView {
  constructor(tokens, onSelect) {
    Object.assign(this, { tokens, onSelect, selected: null, colour: null, withNumbers: false, rows: rowStarts(tokens) });
    this.chunks = chunked(tokens).map(([start, end]) => ({ start, end, filled: false, element: this.placeholder(start, end) }));
    this.element = h("div", { class: "tokens", tabindex: 0, "aria-label": `${plural(tokens.ids.length, "token")}; arrows go from one to the next` },
      this.chunks.map(({ element }) => element));
    this.watch = new IntersectionObserver((seen) => this.seen(seen), { rootMargin: "1200px 0px" });
    for (const chunk of this.chunks) this.watch.observe(chunk.element);
    this.element.addEventListener("pointerover", (event) => this.hover(event));
    this.element.addEventListener("pointerleave", () => this.selected === null && hideCard());
    this.element.addEventListener("click", (event) => this.click(event));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  placeholder(start, end) {
    let characters = 0;
    for (let at = start; at < end; at += 1) characters += pieceOf(this.tokens, at).length;
    const width = Math.max(300, Math.min(innerWidth - 60, 1000));
    const height = Math.max(1, Math.ceil((characters * 8.2) / width)) * 27;
    return h("div", { class: "chunk", "data-start": start, style: { "min-height": `${height}px` } });
  }

  seen(entries) {
    for (const entry of entries) {
      if (entry.isIntersecting) this.fill(this.chunks.find(({ element }) => element === entry.target));
    }
  }

  fill(chunk) {
    if (chunk.filled) return;
    chunk.filled = true;
    const spans = [];
    for (let at = chunk.start; at < chunk.end; at += 1) spans.push(this.span(at));
    chunk.element.style.minHeight = "";
    chunk.element.replaceChildren(...spans);
    this.watch.unobserve(chunk.element);
  }

  span(at) {
    const span = document.createElement("span");
    span.dataset.at = at;
    span.textContent = visible(pieceOf(this.tokens, at)).replaceAll("\n", "⏎\n");
    if (this.rows.has(at)) span.dataset.row = this.rows.get(at);
    this.dress(span, at);
    return span;
  }

  dress(span, at) {
    const clipped = this.colour === "ratio" && this.tokens.clipped?.[at] ? " clipped" : "";
    span.className = `token ${this.colouring?.classOf(at) ?? ""}${clipped}${at === this.selected ? " selected" : ""}`;
    const value = this.colouring?.values[at];
    if (this.withNumbers && isNumber(value)) span.dataset.value = short(value);
    else delete span.dataset.value;
  }

  recolour(name) {
    this.colour = name;
    this.colouring = name ? colouring(this.tokens, name) : null;
    this.dressAll();
  }

  numbers(on) {
    this.withNumbers = on;
    this.element.classList.toggle("with-numbers", on);
    this.dressAll();
  }

  dressAll() {
    for (const span of this.element.querySelectorAll(".token")) this.dress(span, Number(span.dataset.at));
  }

  spanAt(at) {
    return this.element.querySelector(`[data-at="${at}"]`);
  }

  hover(event) {
    const span = event.target.closest(".token");
    if (span && this.selected === null) showCard(this.tokens, Number(span.dataset.at), span);
  }

  click(event) {
    const span = event.target.closest(".token");
    const at = span ? Number(span.dataset.at) : null;
    this.select(at === this.selected ? null : at);
  }

  /** Keep the card of one token open; null closes it. */
  select(at) {
    const before = this.selected;
    this.selected = at;
    if (before !== null && this.spanAt(before)) this.dress(this.spanAt(before), before);
    this.onSelect(at);
    if (at === null) return hideCard();
    this.fill(this.chunks.find(({ start, end }) => start <= at && at < end));
    const span = this.spanAt(at);
    this.dress(span, at);
    span.scrollIntoView({ block: "nearest" });
    showCard(this.tokens, at, span);
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape" && this.selected !== null) this.select(null);
    else if (move) this.select(Math.max(0, Math.min(this.tokens.ids.length - 1, (this.selected ?? -1) + move)));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** The facts of a token, as rows of name and value. */
function tokenFacts(tokens, at) {
  const named = { policy_logprob: "log-prob, policy", sampler_logprob: "log-prob, sampler", ref_logprob: "log-prob, reference" };
  const facts = [["token", `${at} of ${tokens.ids.length}`], ["id", tokens.ids[at]]];
  if (tokens.pieces) facts.push(["text", JSON.stringify(tokens.pieces[at])]);
  for (const [name, label] of Object.entries(named)) {
    const value = tokens[name]?.[at];
    if (isNumber(value)) facts.push([label, `${short(value)}  (p = ${short(Math.exp(value))})`]);
  }
  const gap = gapOf(tokens, at);
  if (gap !== null) facts.push(["gap", short(gap)]);
  for (const name of ["advantage", "ratio", "gradient", "version"]) {
    if (isNumber(tokens[name]?.[at])) facts.push([name, short(tokens[name][at])]);
  }
  if (tokens.clipped && isNumber(tokens.clipped[at])) facts.push(["clipped", tokens.clipped[at] ? "yes: no gradient" : "no"]);
  if (tokens.mask) facts.push(["mask", tokens.mask[at] ? "trained" : "not trained"]);
  return facts;
}

function showCard(tokens, at, span) {
  const card = byId("card");
  replace(card, h("table", {}, tokenFacts(tokens, at).map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, value)))));
  card.hidden = false;
  const box = span.getBoundingClientRect();
  const below = box.bottom + card.offsetHeight + 8 < innerHeight;
  card.style.left = `${Math.max(6, Math.min(box.left, innerWidth - card.offsetWidth - 6))}px`;
  card.style.top = `${Math.max(6, below ? box.bottom + 6 : box.top - card.offsetHeight - 6)}px`;
}

function hideCard() {
  byId("card").hidden = true;
}
