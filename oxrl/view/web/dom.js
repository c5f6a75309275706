// Elements from plain values. What a model wrote becomes a text node and nothing else: no function of this page parses
// markup.

const SVG = "http://www.w3.org/2000/svg";

/** h("a", {class: "chip", href: "#/"}, "text", child): an HTML element. */
function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
function s(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Give an element other children. */
function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

/** A small labelled fact; `title` explains it on hover. */
function chip(text, kind = "", title = null) {
  return h("span", { class: `chip ${kind}`, title }, text);
}

/** Call `action` once things have been quiet for a moment. */
function debounced(action, milliseconds = 120) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}
