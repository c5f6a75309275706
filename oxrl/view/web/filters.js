// Which answers are shown: by text, reward, and what went wrong. The choice is part of the address.

const KINDS = {
  truncated: { label: "truncated", test: (answer) => answer.status === "truncated" },
  ungraded: { label: "ungraded", test: isUngraded },
  tool: { label: "tool error", test: hasToolError },
};
const searched = new WeakMap(); // answer -> its text in lower case

function isUngraded(answer) {
  return !isRow(answer) && !isNumber(answer.reward);
}

/** Results of tools that failed begin with "error". */
function hasToolError(answer) {
  return (answer.messages ?? []).some((message) => message.role === "tool" && /^\s*error/i.test(textOf(message)));
}

function searchText(answer) {
  if (!searched.has(answer)) {
    const calls = (answer.messages ?? []).map((message) => (message.tool_calls ? JSON.stringify(message.tool_calls) : ""));
    const parts = [answer.sample_id, answer.error, answer.left_out, ...(answer.messages ?? []).map(textOf), ...calls];
    searched.set(answer, [...parts, answer.text].filter(Boolean).join("\n").toLowerCase());
  }
  return searched.get(answer);
}

/** The filter in the address. */
function currentFilter() {
  const query = currentRoute().query;
  const number = (name) => (query.get(name) ? Number(query.get(name)) : null);
  const only = (query.get("only") ?? "").split(",").filter((name) => name in KINDS);
  return { text: query.get("q") ?? "", min: number("min"), max: number("max"), only };
}

const isActive = ({ text, min, max, only }) => Boolean(text || min !== null || max !== null || only.length);

/** What links to other views keep of the address. */
function filterQuery() {
  const query = currentRoute().query;
  return Object.fromEntries(["q", "min", "max", "only", "sort", "list"].map((name) => [name, query.get(name)]));
}

/** A function from an answer to whether it is shown. */
function matcher({ text, min, max, only }) {
  const wanted = text.toLowerCase();
  return (answer) =>
    (min === null || (isNumber(valueOf(answer)) && valueOf(answer) >= min)) &&
    (max === null || (isNumber(valueOf(answer)) && valueOf(answer) <= max)) &&
    only.every((name) => KINDS[name].test(answer)) &&
    (!wanted || searchText(answer).includes(wanted));
}

/** The inputs of the filter, of answers or of rows; `changed` is called when it is another one. Returns {element, count(shown, all)}. */
function filterBar(changed, rows = false) {
  const filter = currentFilter();
  const later = debounced(changed);
  const field = (name, attributes, value) => h("input", {
    ...attributes, name, value: value ?? "",
    oninput: (event) => {
      remember(name, event.target.value);
      later();
    },
  });
  const toggle = (name) => h("label", { class: "toggle" }, h("input", {
    type: "checkbox", name, checked: filter.only.includes(name),
    onchange: () => {
      const on = Object.keys(KINDS).filter((each) => element.querySelector(`input[name=${each}]`)?.checked);
      remember("only", on.join(","));
      changed();
    },
  }), KINDS[name].label);
  const counted = h("span", { class: "count", role: "status" });
  const [noun, value] = rows ? ["row", "log-prob"] : ["answer", "reward"];
  const search = { type: "search", placeholder: `text in ${noun}s  ( / )`, "aria-label": "text", "data-filter": true };
  const bound = (what) => ({ type: "number", step: "any", placeholder: what, "aria-label": `${what} ${value}`, class: "narrow" });
  const element = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    field("q", search, filter.text),
    h("span", { class: "pair" }, field("min", bound("lowest"), filter.min), `≤ ${value} ≤`, field("max", bound("highest"), filter.max)),
    rows ? null : Object.keys(KINDS).map(toggle), counted);
  const count = (shown, all) => replace(counted, shown === all ? plural(all, noun) : `${short(shown)} of ${plural(all, noun)}`);
  return { element, count };
}
