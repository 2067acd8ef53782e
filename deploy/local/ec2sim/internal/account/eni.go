package account

import (
	"net/netip"
	"slices"
	"time"
)

const (
	maxDescription        = 255
	maxGroupsPerInterface = 5 // AWS's default quota
)

// DryRun is the parameter that turns a request into a rehearsal.
type DryRun struct {
	DryRun bool `query:"DryRun" json:"-"`
}

// PrivateIPAddress is one explicit address in a request.
type PrivateIPAddress struct {
	Address string `query:"PrivateIpAddress"`
	Primary bool   `query:"Primary"`
}

// PrefixSpec is one explicit prefix in a request to create or launch.
type PrefixSpec struct {
	Prefix string `query:"Ipv4Prefix"`
}

// AddressSpec says which addresses a new interface shall have. The zero value
// asks for one primary address of EC2's choice.
type AddressSpec struct {
	PrivateIPAddress   string             `query:"PrivateIpAddress"`
	PrivateIPAddresses []PrivateIPAddress `query:"PrivateIpAddresses"`
	SecondaryCount     int                `query:"SecondaryPrivateIpAddressCount"`
	Prefixes           []PrefixSpec       `query:"Ipv4Prefix"`
	PrefixCount        int                `query:"Ipv4PrefixCount"`
}

// CreateNetworkInterfaceRequest is the input of CreateNetworkInterface.
type CreateNetworkInterfaceRequest struct {
	DryRun            `query:",inline"`
	AddressSpec       `query:",inline"`
	SubnetID          SubnetID           `query:"SubnetId"`
	Description       string             `query:"Description"`
	InterfaceType     string             `query:"InterfaceType"`
	SecurityGroups    []GroupID          `query:"SecurityGroupId"`
	TagSpecifications []TagSpecification `query:"TagSpecification"`
	ClientToken       string             `query:"ClientToken" json:"-"`
}

// CreateNetworkInterfaceResponse is the output of CreateNetworkInterface.
type CreateNetworkInterfaceResponse struct {
	NetworkInterface NetworkInterface
	ClientToken      string
}

// CreateNetworkInterface makes an unattached interface. With a client token
// that was used before for the same parameters it answers for the interface
// made then, even if that was deleted since.
func (a *Account) CreateNetworkInterface(req CreateNetworkInterfaceRequest) (CreateNetworkInterfaceResponse, *Error) {
	resp := CreateNetworkInterfaceResponse{ClientToken: req.ClientToken}
	err := a.mutate(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		if req.SubnetID == "" {
			return missing("subnetId")
		}
		if t := req.InterfaceType; t != "" && t != "interface" {
			return Errorf(codeUnsupportedOperation, "The interface type '%s' is not simulated.", t)
		}
		const action = "CreateNetworkInterface"
		print := fingerprint(req)
		earlier, found, err := s.recall(action, req.ClientToken, print, now)
		if err != nil {
			return err
		}
		if found {
			resp.NetworkInterface = earlier.eni
			if eni, ok := s.enis.get(earlier.eni.ID); ok {
				resp.NetworkInterface = eni
			}
			return nil
		}
		tags, err := specifiedTags(req.TagSpecifications, "network-interface")
		if err != nil {
			return err
		}
		eni, err := s.createInterface(interfaceSpec{
			subnet: req.SubnetID, groups: req.SecurityGroups, description: req.Description,
			addresses: req.AddressSpec, tags: tags["network-interface"],
		}, now)
		if err != nil {
			return err
		}
		s.remember(action, req.ClientToken, token{fingerprint: print, expires: now.Add(tokenLifetime), eni: eni})
		resp.NetworkInterface = eni
		return nil
	})
	if err != nil {
		return CreateNetworkInterfaceResponse{}, err
	}
	return resp, nil
}

// interfaceSpec is what CreateNetworkInterface and RunInstances ask for.
type interfaceSpec struct {
	subnet      SubnetID
	groups      []GroupID
	description string
	addresses   AddressSpec
	tags        []Tag
}

func (s *state) createInterface(spec interfaceSpec, now time.Time) (NetworkInterface, *Error) {
	subnet, err := find(s.subnets, kindSubnet(), spec.subnet)
	if err != nil {
		return NetworkInterface{}, err
	}
	if len(spec.description) > maxDescription {
		return NetworkInterface{}, invalid("Value for parameter description is invalid. It must have at most %d characters.", maxDescription)
	}
	groups, err := s.groupRefs(spec.groups, subnet)
	if err != nil {
		return NetworkInterface{}, err
	}
	plan, err := s.planAddresses(spec.addresses)
	if err != nil {
		return NetworkInterface{}, err
	}
	eni := NetworkInterface{
		ID: ENIID(s.newID("eni-")), Subnet: subnet.ID, VPC: subnet.VPC, Zone: subnet.Zone, ZoneID: subnet.ZoneID,
		Description: spec.description, MAC: s.newMAC(), Status: StatusAvailable, SourceDestCheck: true,
		Groups: groups, Tags: spec.tags, Created: now,
	}
	if err := s.takeForNew(&eni, plan); err != nil {
		return NetworkInterface{}, err
	}
	s.enis.put(eni.ID, eni)
	return eni, nil
}

// addressPlan is an AddressSpec that was checked.
type addressPlan struct {
	primary        netip.Addr // invalid: any
	secondary      []netip.Addr
	secondaryCount int
	prefixes       []netip.Prefix
	prefixCount    int
}

func (s *state) planAddresses(spec AddressSpec) (addressPlan, *Error) {
	if spec.SecondaryCount < 0 || spec.PrefixCount < 0 {
		return addressPlan{}, invalid("The number of addresses or prefixes must not be negative")
	}
	var texts, prefixTexts []string
	primary := -1
	for i, p := range spec.PrivateIPAddresses {
		if p.Primary && primary >= 0 {
			return addressPlan{}, combination("Only one address can be the primary one")
		}
		if p.Primary {
			primary = i
		}
		texts = append(texts, p.Address)
	}
	if spec.PrivateIPAddress != "" {
		if primary >= 0 {
			return addressPlan{}, combination("The parameter privateIpAddress cannot be used with a primary address in privateIpAddresses")
		}
		primary = len(texts)
		texts = append(texts, spec.PrivateIPAddress)
	}
	for _, p := range spec.Prefixes {
		prefixTexts = append(prefixTexts, p.Prefix)
	}
	plan := addressPlan{secondaryCount: spec.SecondaryCount, prefixCount: spec.PrefixCount}
	var err *Error
	if plan.secondary, err = parseAddrs(texts); err != nil {
		return addressPlan{}, err
	}
	if plan.prefixes, err = parsePrefixes(prefixTexts); err != nil {
		return addressPlan{}, err
	}
	if primary >= 0 {
		plan.primary = plan.secondary[primary]
		plan.secondary = slices.Delete(plan.secondary, primary, primary+1)
	}
	if len(plan.secondary) > 0 && plan.secondaryCount > 0 {
		return addressPlan{}, combination("The parameter secondaryPrivateIpAddressCount cannot be used with secondary addresses in privateIpAddresses")
	}
	if len(plan.prefixes) > 0 && plan.prefixCount > 0 {
		return addressPlan{}, combination("The parameter ipv4PrefixCount cannot be used with the parameter ipv4Prefix")
	}
	addresses, prefixes := len(plan.secondary)+plan.secondaryCount, len(plan.prefixes)+plan.prefixCount
	if addresses > 0 && prefixes > 0 {
		return addressPlan{}, combination("Secondary addresses and prefixes cannot be given in the same request")
	}
	if 1+addresses+prefixes > s.limits.MaxAddresses() {
		return addressPlan{}, Errorf("PrivateIpAddressLimitExceeded", "Number of private addresses will exceed limit.")
	}
	return plan, nil
}

// takeForNew takes the planned addresses: the named ones first, lest a chosen
// one is among them.
func (s *state) takeForNew(eni *NetworkInterface, plan addressPlan) *Error {
	if err := s.takeExactPrefixes(eni.Subnet, plan.prefixes, eni.ID); err != nil {
		return err
	}
	named := plan.secondary
	if plan.primary.IsValid() {
		named = append([]netip.Addr{plan.primary}, named...)
	}
	if err := s.takeExact(eni.Subnet, named, eni.ID); err != nil {
		return err
	}
	eni.Primary = plan.primary
	if !eni.Primary.IsValid() {
		addrs, err := s.takeAny(eni.Subnet, 1, eni.ID)
		if err != nil {
			return err
		}
		eni.Primary = addrs[0]
	}
	more, err := s.takeAny(eni.Subnet, plan.secondaryCount, eni.ID)
	if err != nil {
		return err
	}
	blocks, err := s.takePrefixes(eni.Subnet, plan.prefixCount, eni.ID)
	if err != nil {
		return err
	}
	eni.Secondary = slices.Concat(plan.secondary, more)
	eni.Prefixes = slices.Concat(plan.prefixes, blocks)
	return nil
}

// groupRefs resolves security groups for an interface in a subnet. None means
// the default group of the VPC.
func (s *state) groupRefs(ids []GroupID, subnet Subnet) ([]GroupRef, *Error) {
	if len(ids) == 0 {
		for _, group := range s.groups.all() {
			if group.VPC == subnet.VPC && group.Name == "default" {
				return []GroupRef{{ID: group.ID, Name: group.Name}}, nil
			}
		}
	}
	var refs []GroupRef
	for _, id := range ids {
		group, err := find(s.groups, kindGroup(), id)
		if err != nil {
			return nil, err
		}
		if group.VPC != subnet.VPC {
			return nil, Errorf("InvalidParameter", "Security group %s and subnet %s belong to different networks.", id, subnet.ID)
		}
		ref := GroupRef{ID: group.ID, Name: group.Name}
		if !slices.Contains(refs, ref) {
			refs = append(refs, ref)
		}
	}
	if len(refs) > maxGroupsPerInterface {
		return nil, Errorf("SecurityGroupsPerInterfaceLimitExceeded", "The maximum number of security groups per interface has been reached.")
	}
	return refs, nil
}

// DeleteNetworkInterfaceRequest is the input of DeleteNetworkInterface.
type DeleteNetworkInterfaceRequest struct {
	DryRun             `query:",inline"`
	NetworkInterfaceID ENIID `query:"NetworkInterfaceId"`
}

// DeleteNetworkInterface deletes an interface that is attached to nothing.
func (a *Account) DeleteNetworkInterface(req DeleteNetworkInterfaceRequest) *Error {
	return a.mutate(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		eni, err := s.eni(req.NetworkInterfaceID)
		if err != nil {
			return err
		}
		if eni.Attachment != nil {
			return invalid("Network interface '%s' is currently in use.", eni.ID)
		}
		s.deleteInterface(eni)
		return nil
	})
}

func (s *state) deleteInterface(eni NetworkInterface) {
	s.release(eni.Subnet, eni.Addresses()...)
	for _, prefix := range eni.Prefixes {
		s.release(eni.Subnet, expand(prefix)...)
	}
	s.enis.del(eni.ID)
}

// ModifyNetworkInterfaceAttributeRequest is the input of
// ModifyNetworkInterfaceAttribute. Exactly one attribute may be given.
type ModifyNetworkInterfaceAttributeRequest struct {
	DryRun             `query:",inline"`
	NetworkInterfaceID ENIID `query:"NetworkInterfaceId"`
	Attachment         *struct {
		AttachmentID        AttachmentID `query:"AttachmentId"`
		DeleteOnTermination *bool        `query:"DeleteOnTermination"`
	} `query:"Attachment"`
	SecurityGroups  []GroupID `query:"SecurityGroupId"`
	SourceDestCheck *struct {
		Value *bool `query:"Value"`
	} `query:"SourceDestCheck"`
	Description *struct {
		Value *string `query:"Value"`
	} `query:"Description"`
}

// ModifyNetworkInterfaceAttribute changes one attribute of an interface.
func (a *Account) ModifyNetworkInterfaceAttribute(req ModifyNetworkInterfaceAttributeRequest) *Error {
	return a.mutate(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		eni, err := s.eni(req.NetworkInterfaceID)
		if err != nil {
			return err
		}
		given := 0
		for _, present := range []bool{req.Attachment != nil, len(req.SecurityGroups) > 0, req.SourceDestCheck != nil, req.Description != nil} {
			if present {
				given++
			}
		}
		switch {
		case given == 0:
			return combination("No attributes specified.")
		case given > 1:
			return combination("Fields for multiple attribute types specified")
		case req.Attachment != nil:
			err = modifyAttachment(&eni, req.Attachment.AttachmentID, req.Attachment.DeleteOnTermination)
		case len(req.SecurityGroups) > 0:
			subnet, _ := s.subnets.get(eni.Subnet)
			eni.Groups, err = s.groupRefs(req.SecurityGroups, subnet)
		case req.SourceDestCheck != nil:
			if req.SourceDestCheck.Value == nil {
				return missing("sourceDestCheck.value")
			}
			eni.SourceDestCheck = *req.SourceDestCheck.Value
		case req.Description != nil:
			if req.Description.Value == nil {
				return missing("description.value")
			}
			if len(*req.Description.Value) > maxDescription {
				return invalid("Value for parameter description is invalid. It must have at most %d characters.", maxDescription)
			}
			eni.Description = *req.Description.Value
		}
		if err != nil {
			return err
		}
		s.enis.put(eni.ID, eni)
		return nil
	})
}

func modifyAttachment(eni *NetworkInterface, id AttachmentID, deleteOnTermination *bool) *Error {
	if id == "" {
		return missing("attachment.attachmentId")
	}
	if deleteOnTermination == nil {
		return missing("attachment.deleteOnTermination")
	}
	if err := kindAttachment().check(string(id)); err != nil {
		return err
	}
	if eni.Attachment == nil || eni.Attachment.ID != id {
		return kindAttachment().missing(string(id))
	}
	attachment := *eni.Attachment
	attachment.DeleteOnTermination = *deleteOnTermination
	eni.Attachment = &attachment
	return nil
}

// eni finds an interface, and refuses an absent, malformed or unknown id.
func (s *state) eni(id ENIID) (NetworkInterface, *Error) {
	if id == "" {
		return NetworkInterface{}, missing("networkInterfaceId")
	}
	return find(s.enis, kindENI(), id)
}
