# weir's image; docs/docker.md says how to run it. Two stages build, and nothing they need comes with the third: it has Node.js, iproute2,
# weir and its production dependencies, no compiler and no npm.
FROM node:22.20.0-trixie-slim AS base

FROM base AS build
WORKDIR /build
COPY package.json package-lock.json ./
RUN npm ci --ignore-scripts --no-audit --no-fund
COPY tsconfig.json tsconfig.build.json ./
COPY lib lib
COPY web web
RUN npm run build && rm dist/.tsbuildinfo

# koffi's prebuilt part is an optional dependency, so these cannot be omitted as a whole; raw-socket would have to be compiled.
FROM base AS dependencies
WORKDIR /build
COPY package.json package-lock.json ./
RUN npm ci --omit=dev --ignore-scripts --no-audit --no-fund && rm -r node_modules/raw-socket node_modules/nan

FROM base
LABEL org.opencontainers.image.title="weir" \
      org.opencontainers.image.description="A userspace L4 load balancer with its own connection tracking, on a TUN device" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT"
RUN apt-get update \
 && apt-get install -y --no-install-recommends iproute2 \
 && rm -rf /var/lib/apt/lists/* \
    /usr/local/lib/node_modules /usr/local/bin/npm /usr/local/bin/npx /usr/local/bin/corepack /usr/local/bin/yarn* /opt/yarn*
RUN groupadd --system --gid 961 weir \
 && useradd --system --uid 961 --gid weir --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin weir \
 && mkdir -p /etc/weir /run/weir \
 && chown weir:weir /run/weir \
 && ln -s /opt/weir/bin/weir.js /usr/local/bin/weir
WORKDIR /opt/weir
COPY package.json LICENSE README.md CHANGELOG.md ./
COPY bin bin
COPY conf conf
COPY --from=dependencies /build/node_modules node_modules
COPY --from=build /build/dist dist
ENV NODE_ENV=production
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["weir", "status"]
ENTRYPOINT ["/opt/weir/conf/docker-entrypoint.sh"]
CMD ["run", "-c", "/etc/weir/weir.yaml"]
