{{/* Names, labels and what every pod and container has. */}}

{{- define "lisarec.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Arguments: the root, and the component's name. */}}
{{- define "lisarec.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: lisarec
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "lisarec.metadata" -}}
{{- $root := index . 0 -}}
name: {{ $root.Release.Name }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "lisarec.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- end }}

{{/* Arguments: the root, the component's name, and the numeric user and group. */}}
{{- define "lisarec.pod" -}}
{{- $root := index . 0 -}}
enableServiceLinks: false # a Service named lisarec would set LISAREC_PORT
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ index . 2 }}
  runAsGroup: {{ index . 3 }}
  fsGroup: {{ index . 3 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Over machines and zones as evenly as there is room. Arguments: the root, and the component's name. */}}
{{- define "lisarec.spread" -}}
{{- $selector := include "lisarec.selector" . -}}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels: {{ $selector | nindent 8 }}
  {{- end }}
{{- end }}

{{- define "lisarec.hardened" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{/* A container of the service's image. Argument: the root. */}}
{{- define "lisarec.container" -}}
image: {{ include "lisarec.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{ include "lisarec.hardened" . }}
{{- with .Values.storage.bucket.secret }}
envFrom: [{ secretRef: { name: {{ . }} } }]
{{- end }}
{{- end }}

{{/* The full name of a component's Service, which is in the component's certificate. Arguments: the root, and the component. */}}
{{- define "lisarec.host" -}}
{{- $root := index . 0 -}}
{{ printf "%s-%s.%s.svc.%s" $root.Release.Name (index . 1) $root.Release.Namespace $root.Values.balancer.clusterDomain }}
{{- end }}

{{/* The name by which clients reach a component of the chart's own Redis; with TLS the one in its certificate. */}}
{{- define "lisarec.redisHost" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.redis.tlsSecret }}{{ include "lisarec.host" . }}{{ else }}{{ $root.Release.Name }}-{{ index . 1 }}{{ end }}
{{- end }}

{{/* HOST:PORT of each node of the chart's own Redis Cluster, separated by commas; empty where there is none. */}}
{{- define "lisarec.redisNodes" -}}
{{- $cluster := .Values.redis.cluster | default (dict "primaries" 0 "replicas" 1) -}}
{{- if and .Values.redis.url $cluster.primaries -}}
{{- fail "redis.url names another Redis, and redis.cluster.primaries asks for a cluster here: set one of them" -}}
{{- end -}}
{{- if and .Values.redis.url .Values.redis.tlsSecret -}}
{{- fail "redis.url names another Redis, and redis.tlsSecret is for the one here: put rediss:// and ssl_ca_certs into the URL" -}}
{{- end -}}
{{- $service := include "lisarec.redisHost" (list . "redis-node") -}}
{{- $nodes := list -}}
{{- range until (int (mul $cluster.primaries (add1 $cluster.replicas))) -}}
{{- $nodes = append $nodes (printf "%s-redis-node-%d.%s:6379" $.Release.Name . $service) -}}
{{- end -}}
{{- join "," $nodes -}}
{{- end }}

{{/* The component that serves the chart's own Redis. */}}
{{- define "lisarec.redis" -}}
{{ ternary "redis-node" "redis" (ne (include "lisarec.redisNodes" .) "") }}
{{- end }}

{{- define "lisarec.redisURL" -}}
{{- $nodes := include "lisarec.redisNodes" . -}}
{{- $addresses := $nodes | default (printf "%s:6379/0" (include "lisarec.redisHost" (list . "redis"))) -}}
{{- if .Values.redis.tlsSecret -}}
rediss://lisarec@{{ $addresses }}?ssl_ca_certs=/redis-ca/ca.crt
{{- else -}}
{{ .Values.redis.url | default (printf "redis://lisarec@%s" $addresses) }}
{{- end -}}
{{- end }}

{{/* The Secret that has Redis's password; empty for a Redis without one. */}}
{{- define "lisarec.redisSecret" -}}
{{- if .Values.redis.passwordSecret }}{{ .Values.redis.passwordSecret }}
{{- else if not .Values.redis.url }}{{ .Release.Name }}-redis
{{- end }}
{{- end }}

{{/* Empty where models and archive are in volumes. */}}
{{- define "lisarec.usesBucket" -}}
{{ .Values.storage.models.url }}{{ .Values.storage.archive.url }}
{{- end }}

{{/* Where the models or the archive are. Arguments: the root, and which. */}}
{{- define "lisarec.place" -}}
{{ (index (index . 0).Values.storage (index . 1)).url | default (printf "/%s" (index . 1)) }}
{{- end }}

{{- define "lisarec.environment" -}}
{{- $models := include "lisarec.place" (list . "models") -}}
- { name: LISAREC_MODELS_DIR, value: {{ $models }} }
- { name: LISAREC_MODEL_DIR, value: {{ with .Values.model }}{{ printf "%s/%s" $models . | quote }}{{ else }}""{{ end }} }
- { name: LISAREC_REDIS_URL, value: {{ include "lisarec.redisURL" . | quote }} }
- { name: LISAREC_REDIS_PASSWORD_FILE, value: {{ if include "lisarec.redisSecret" . }}/secrets/redis_password{{ else }}""{{ end }} }
- { name: LISAREC_ARCHIVE_DIR, value: {{ include "lisarec.place" (list . "archive") }} }
{{- if include "lisarec.usesBucket" . }}
- { name: LISAREC_CACHE_DIR, value: /cache }
{{- end }}
- { name: LISAREC_KEYS_FILE, value: /keys/keys }
{{- if .Values.modelKeys.secret }}
- { name: LISAREC_MODEL_KEYS_FILE, value: /model-keys/model_keys.pem }
{{- end }}
{{- $replicas := dict "LISAREC_REDIS_REPLICAS" (ternary "1" "0" (ne (include "lisarec.redisNodes" .) "")) }}
{{- range $name, $value := merge (dict) .Values.settings $replicas }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- end }}

{{/* Arguments: the root, and for each shared folder that the container has, whether it may only read it. */}}
{{- define "lisarec.mounts" -}}
{{- $root := index . 0 -}}
- { name: tmp, mountPath: /tmp }
{{- range $name, $readOnly := index . 1 }}
{{- if not (dig $name "url" "" $root.Values.storage) }}
- { name: {{ $name }}, mountPath: /{{ $name }}, readOnly: {{ $readOnly }} }
{{- end }}
{{- end }}
{{- if include "lisarec.usesBucket" $root }}
- { name: cache, mountPath: /cache }
{{- end }}
{{- if include "lisarec.redisSecret" $root }}
- { name: secrets, mountPath: /secrets, readOnly: true }
{{- end }}
{{- if $root.Values.redis.tlsSecret }}
- { name: redis-ca, mountPath: /redis-ca, readOnly: true }
{{- end }}
{{- if $root.Values.modelKeys.secret }}
- { name: model-keys, mountPath: /model-keys, readOnly: true }
{{- end }}
{{- end }}

{{/* What checks a certificate gets of its Secret: not the key. Argument: the Secret's name. */}}
{{- define "lisarec.authority" -}}
secret: { secretName: {{ . }}, defaultMode: 0440, items: [{ key: ca.crt, path: ca.crt }] }
{{- end }}

{{/* Arguments: those of `lisarec.mounts`. */}}
{{- define "lisarec.volumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir: { medium: Memory, sizeLimit: 512Mi }
{{- range $name, $readOnly := index . 1 }}
{{- if eq $name "keys" }}
- name: keys
  secret: { secretName: {{ $root.Values.keys.secret }}, defaultMode: 0440 }
{{- else if not (index $root.Values.storage $name).url }}
- name: {{ $name }}
  persistentVolumeClaim: { claimName: {{ (index $root.Values.storage $name).claim | default (printf "%s-%s" $root.Release.Name $name) }} }
{{- end }}
{{- end }}
{{- if include "lisarec.usesBucket" $root }}
- name: cache
  emptyDir: { sizeLimit: {{ $root.Values.storage.bucket.cacheSize }} }
{{- end }}
{{- with include "lisarec.redisSecret" $root }}
- name: secrets
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    {{- if not $root.Values.redis.url }}
    items: [{ key: redis_password, path: redis_password }] # those of the users `admin` and `replica` are Redis's alone
    {{- end }}
{{- end }}
{{- with $root.Values.redis.tlsSecret }}
- name: redis-ca
  {{- include "lisarec.authority" . | nindent 2 }}
{{- end }}
{{- with $root.Values.modelKeys.secret }}
- name: model-keys
  secret: { secretName: {{ . }}, defaultMode: 0440 }
{{- end }}
{{- end }}

{{/* The metadata of what the Prometheus operator reads. */}}
{{- define "lisarec.monitored" -}}
{{- include "lisarec.metadata" . }}
  {{- with (index . 0).Values.monitoring.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
